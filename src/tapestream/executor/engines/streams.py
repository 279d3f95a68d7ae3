"""The few stream operations that the `cuda` engine needs; `FakeStreams` has them too, without a GPU."""

from typing import Protocol, TypeVar

import torch

from tapestream.storage import Region

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class StreamApi(Protocol[StreamT, EventT]):
    """Streams, events and asynchronous copies. The last four methods do nothing but check."""

    def new_stream(self) -> StreamT:
        """A stream on which nothing has been issued."""

    def current_stream(self) -> StreamT:
        """The stream that compute is issued to now."""

    def record(self, stream: StreamT) -> EventT:
        """An event that happens when all issued to ``stream`` so far is done."""

    def wait(self, stream: StreamT, event: EventT) -> None:
        """What is issued to ``stream`` from now on starts after ``event``."""

    def copy(self, stream: StreamT, source: Region, target: Region, nbytes: int) -> None:
        """Issue a copy of the first ``nbytes`` bytes."""

    def synchronize(self, event: EventT) -> None:
        """Block the calling thread until ``event`` has happened."""

    def compute_begins(self, region: Region) -> None:
        """Compute on the current stream (on the calling thread, for a HOST region) is about to use ``region``."""

    def compute_ended(self, region: Region) -> None:
        """That compute has been issued."""

    def host_uses(self, region: Region, *, writes: bool) -> None:
        """The calling thread reads (or writes) ``region`` now."""

    def released(self, region: Region) -> None:
        """The memory of ``region`` may be given to compute issued from now on."""


class TorchStreams:
    """CUDA streams and events of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.cuda.Stream:
        """See `StreamApi`."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        """See `StreamApi`."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See `StreamApi`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `StreamApi`."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, source: Region, target: Region, nbytes: int) -> None:
        """See `StreamApi`."""
        with torch.cuda.stream(stream), torch.no_grad():
            target.memory[:nbytes].copy_(source.memory[:nbytes], non_blocking=True)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """See `StreamApi`; releases the GIL."""
        event.synchronize()

    def compute_begins(self, region: Region) -> None:
        """Nothing to do: the device checks nothing."""

    def compute_ended(self, region: Region) -> None:
        """Nothing to do."""

    def host_uses(self, region: Region, *, writes: bool) -> None:
        """Nothing to do."""

    def released(self, region: Region) -> None:
        """Nothing to do."""
