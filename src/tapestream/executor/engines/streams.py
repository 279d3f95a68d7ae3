"""The few stream operations that the `cuda` engine needs; `FakeStreams` has them too, without a GPU."""

from typing import Protocol, TypeVar

import torch

from tapestream.accelerator.device import active
from tapestream.accelerator.streams import current_stream, event_after, new_stream, on_stream
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

    def happened(self, event: EventT) -> bool:
        """Whether ``event`` has happened."""

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
    """Streams and events of one accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> torch.Stream:
        """See `StreamApi`."""
        return new_stream(self._device)

    def current_stream(self) -> torch.Stream:
        """See `StreamApi`."""
        return current_stream(self._device)

    def record(self, stream: torch.Stream) -> torch.Event:
        """See `StreamApi`."""
        return event_after(stream)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """See `StreamApi`."""
        stream.wait_event(event)

    def copy(self, stream: torch.Stream, source: Region, target: Region, nbytes: int) -> None:
        """See `StreamApi`."""
        with on_stream(stream), torch.no_grad():
            target.memory[:nbytes].copy_(source.memory[:nbytes], non_blocking=True)

    def happened(self, event: torch.Event) -> bool:
        """See `StreamApi`."""
        return event.query()

    def synchronize(self, event: torch.Event) -> None:
        """See `StreamApi`; releases the GIL. Worker threads come here, too, for which another device is current."""
        with active(self._device):
            event.synchronize()

    def compute_begins(self, region: Region) -> None:
        """Nothing to do: the device checks nothing."""

    def compute_ended(self, region: Region) -> None:
        """Nothing to do."""

    def host_uses(self, region: Region, *, writes: bool) -> None:
        """Nothing to do."""

    def released(self, region: Region) -> None:
        """Nothing to do."""
