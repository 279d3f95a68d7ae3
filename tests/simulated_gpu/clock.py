"""The virtual clock: what a run would take on a real card, computed from shapes. Nobody sleeps, all runs agree."""

import ctypes
from dataclasses import dataclass

import torch

from .library import CardNumbers, Library


@dataclass(frozen=True)
class Card:
    """Figures of a card: seconds, bytes a second, operations a second."""

    name: str
    memory: float
    half: float
    single: float
    full: float
    into: float
    out: float
    peer: float
    launch: float = 5e-6  # of the host, for each job: PyTorch issues about 200,000 small operators a second
    kernel: float = 2e-6  # fixed part of a kernel
    copy: float = 10e-6  # fixed part of a copy


CARDS = {
    # NVIDIA's data sheet "H100 Tensor Core GPU" (SXM5): 3.35 TB/s HBM3, 989 TFLOPS bf16 without sparsity, 67 fp32 and
    # fp64 (tensor cores); NVLink 450 GB/s each way. PCIe 5 x16: 64 GB/s each way, of which copies see about 50.
    "h100": Card("H100 SXM", 3.35e12, 989e12, 67e12, 67e12, 50e9, 50e9, 450e9),
    # NVIDIA's "Ada GPU Architecture" paper, RTX 4090: 1,008 GB/s GDDR6X, 165.2 TFLOPS bf16 with fp32 accumulation, 82.6
    # fp32, 1/64 of it fp64. PCIe 4 x16: 32 GB/s each way, of which copies see about 25; no NVLink: peers go by PCIe.
    "rtx4090": Card("RTX 4090", 1.008e12, 165.2e12, 82.6e12, 1.29e12, 25e9, 25e9, 25e9),
}


@dataclass(frozen=True)
class Ran:
    """One thing that ran, in virtual seconds."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int


class Lane:
    """Host work that runs beside the program: an update, a disk. One thing at a time."""

    def __init__(self, library: Library, name: str, bytes_per_second: float | None) -> None:
        self.name = name
        self._library = library
        self._speed = bytes_per_second

    def work(self, name: str, *, seconds: float | None = None, nbytes: int = 0, after: float = 0.0) -> float:
        """Work for ``seconds``, or as long as ``nbytes`` take, not before the moment ``after``; returns its end."""
        if seconds is None:
            if self._speed is None:
                raise ValueError(f"lane {self.name} has no speed: say how many seconds {name} takes")
            seconds = nbytes / self._speed
        return self._library.lane(self.name.encode(), name.encode(), seconds, after, nbytes)


class Clock:
    """Moments are seconds since the clock was set; an event's is known as soon as it is recorded."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def set(self, card: Card | str) -> None:
        """Begin at 0, with a card of the table or one's own."""
        if isinstance(card, str):
            card = CARDS[card]
        names = [name for name, _ in CardNumbers._fields_]
        self._library.set_clock(ctypes.byref(CardNumbers(*(getattr(card, name) for name in names))))

    def off(self) -> None:
        """From now on, events have the real time."""
        self._library.set_clock(None)

    def host(self) -> float:
        """How far the program is: it and autograd's threads share one clock."""
        return self._library.host_time()

    def host_works(self, name: str, seconds: float) -> None:
        """The program itself computes something before it goes on."""
        self._library.host_works(name.encode(), seconds)

    def wait(self, moment: float) -> None:
        """The program waits until then, for a lane."""
        self._library.host_reaches(moment)

    def moment(self, of: torch.Event | torch.Stream) -> float:
        """When an event happens; when all that was issued to a stream has run."""
        if isinstance(of, torch.Event):
            return self._library.event_time(of.event_id)
        return self._library.stream_time(of.device_index, of.stream_id)

    def hold(self, stream: torch.Stream, moment: float) -> None:
        """What is issued to the stream from now on starts no earlier."""
        self._library.hold_stream(stream.device_index, stream.stream_id, moment)

    def lane(self, name: str, bytes_per_second: float | None = None) -> Lane:
        """A lane of this name; two objects of one name are one lane."""
        return Lane(self._library, name, bytes_per_second)

    def record(self) -> list[Ran]:
        """What ran when, in the order in which it was issued."""
        lines = (line.split("\t") for line in self._library.record().decode().splitlines())
        return [Ran(lane, name, float(start), float(end), int(nbytes)) for lane, name, start, end, nbytes in lines]

    def forget_record(self) -> None:
        """Begin an empty record; the time goes on."""
        self._library.forget_record()
