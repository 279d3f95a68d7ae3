"""Ranks that are not there: what `Agreement` and `Collectives` are to those that divide a model, in one process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from simulated_gpu.clock import Clock
from torch import Tensor

import tapestream as ts
from tapestream.peers.agreement import Agreement


class Alike(Agreement):
    """This rank is the first of ``size``, and all others do and say what it does. What they send takes, on the virtual
    clock, what ``link`` says, on a stream of its own, as by NCCL; nothing comes."""

    def __init__(self, size: int, clock: Clock, link: ts.Link) -> None:
        self.group, self.rank, self.size, self._number = None, 0, size, 0
        self.collectives = _Lane(size, clock, link)  # type: ignore[assignment]

    def among(self, ranks: range) -> Any:
        """See `Agreement`. These divide a model all together."""
        assert len(ranks) == self.size
        return self.collectives

    def same(self, tensors: Iterable[Tensor], device: torch.device, source: int = 0) -> None:
        """They are."""

    def _gathered(self, what: str, mine: bytes) -> Sequence[bytes]:
        return [mine] * self.size


class _Lane:
    group = None

    def __init__(self, size: int, clock: Clock, link: ts.Link) -> None:
        self._size, self._clock, self._link = size, clock, link
        self._lane, self._stream = clock.lane("peers"), torch.cuda.Stream()

    def gather(self, whole: Tensor, part: Tensor) -> "_Begun":
        """See `Collectives`."""
        return self._begun("gather", whole.nbytes - part.nbytes)

    def exchange(self, came: Tensor, sent: Tensor) -> "_Begun":
        """See `Collectives`."""
        return self._begun("sum", sent.nbytes // self._size * (self._size - 1))

    def add(self, tensor: Tensor) -> None:
        """See `Collectives`."""

    def largest(self, tensor: Tensor) -> None:
        """See `Collectives`."""

    def _begun(self, name: str, nbytes: int) -> "_Begun":
        self._stream.wait_stream(torch.cuda.current_stream())
        seconds = self._link.latency_seconds + nbytes / self._link.bytes_per_second
        issued = max(self._clock.host(), self._clock.moment(self._stream))
        end = self._lane.work(f"copy: {name}", seconds=seconds, nbytes=nbytes, after=issued)
        self._clock.hold(self._stream, end)
        return _Begun(self._stream.record_event(), self._stream.device)


class _Begun:
    def __init__(self, over: torch.Event, device: torch.device) -> None:
        self._over, self._device = over, device

    def wait(self) -> None:
        """See `Pending`."""
        torch.cuda.current_stream(self._device).wait_event(self._over)
