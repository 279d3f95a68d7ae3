"""`cuda`: copies between device and pinned host memory on streams of their own, and on to disk by worker threads.

Four edges order a copy with everything else, and the fake streams of the tests fail when any is missing:
1. a stream copy starts after all compute issued before it, which is also when the simulator starts it; this covers
   what compute wrote, what it still reads, and memory that the allocator took back from it;
2. compute issued after `wait` starts after the copy;
3. a disk transfer starts after the last stream copy from or to its host region (waited for on the worker thread);
4. compute on the CPU begins after the last stream copy from or to the host regions it uses.
Copies that follow each other through one region are ordered by 2 and then 1, since a region in flight is refused. So
the calling thread never waits for the device, but for 4, in `hand_over` and, in `wait`, for the disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from tapestream.errors import InputError
from tapestream.executor.engines.flight import Flight
from tapestream.executor.engines.protocol import EngineStatistics, Lane, Ticket
from tapestream.executor.engines.streams import EventT, StreamApi, StreamT
from tapestream.executor.engines.threads import DiskLanes
from tapestream.ir import Tier
from tapestream.storage import Region
from tapestream.storage.regions import Use, settle_uses


@dataclass(slots=True, eq=False)
class _StreamUse(Generic[StreamT, EventT]):
    """A copy on a stream, for whoever reads or writes its region on the host."""

    api: StreamApi[StreamT, EventT]
    event: EventT
    number: int

    def happened(self) -> bool:
        return self.api.happened(self.event)

    def settle(self) -> None:
        self.api.synchronize(self.event)


class CudaEngine(Generic[StreamT, EventT]):
    """One stream per direction between DEVICE and HOST, one thread per direction between HOST and DISK."""

    def __init__(self, api: StreamApi[StreamT, EventT], *, name: str = "cuda") -> None:
        self.name = name
        self._api = api
        self._flight = Flight()
        self._disk = DiskLanes()
        self._streams: dict[Lane, StreamT] = {}
        self._events: dict[Ticket, EventT] = {}
        self._number = 0

    def copy(self, source: Region, target: Region, nbytes: int | None = None) -> Ticket:
        """See `CopyEngine.copy`. Raises InputError for a copy between DEVICE and DISK: it goes through HOST."""
        tiers = {source.tier, target.tier}
        if tiers == {Tier.DEVICE, Tier.DISK}:
            raise InputError(
                f"the {self.name} engine has no lane {source.tier.name} -> {target.tier.name}; "
                "copy to HOST, wait, and copy on from there"
            )
        ticket = self._flight.begin(source, target, nbytes)
        if Tier.DEVICE in tiers:
            self._start_on_stream(ticket)
        else:
            self._start_on_thread(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Make compute on the current stream wait; for a disk transfer, block until it has ended."""
        event = self._events.pop(ticket, None)
        if event is not None:
            self._flight.end(ticket)
            self._api.wait(self._api.current_stream(), event)
            return
        self._disk.wait(ticket, self._flight)

    def compute_begins(self, regions: Sequence[Region]) -> None:
        """See `CopyEngine.compute_begins`. Compute on HOST regions is taken to run on the CPU."""
        self._flight.check_arrived(regions)
        for region in regions:
            _settle(region)
            self._api.compute_begins(region)

    def hand_over(self, regions: Sequence[Region]) -> None:
        """See `CopyEngine.hand_over`."""
        for region in regions:
            _settle(region)
            self._api.host_uses(region, writes=True)

    def compute_ended(self, regions: Sequence[Region]) -> None:
        """No event is needed: each later copy waits for all compute issued before it (edge 1)."""
        for region in regions:
            self._api.compute_ended(region)

    def on_host(self, regions: Sequence[Region]) -> Callable[[], None]:
        """See `CopyEngine.on_host`."""
        self._flight.check_arrived(regions)
        return self._before(regions, regions)

    def release(self, region: Region) -> None:
        """See `CopyEngine.release`. Compute may have the memory at once; copies into it wait as ever (edges 1, 3)."""
        self._flight.check_untouched(region)
        self._api.released(region)

    def abandon(self) -> None:
        """See `CopyEngine.abandon`: blocks until streams and threads are done with every region."""
        self._flight.clear()
        for event in self._events.values():
            self._api.synchronize(event)
        self._events.clear()
        self._disk.abandon()

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self.abandon()
        self._disk.close()

    def statistics(self) -> EngineStatistics:
        """See `CopyEngine.statistics`; time that the device's compute waited for copies is not known to the host."""
        return self._flight.statistics()

    def _start_on_stream(self, ticket: Ticket) -> None:
        if ticket.lane not in self._streams:
            self._streams[ticket.lane] = self._api.new_stream()
        stream = self._streams[ticket.lane]
        self._api.wait(stream, self._api.record(self._api.current_stream()))
        self._api.copy(stream, ticket.source, ticket.target, ticket.nbytes)
        event = self._events[ticket] = self._api.record(stream)
        self._number += 1
        for region in (ticket.source, ticket.target):
            if region.tier is Tier.HOST:
                region.uses[stream] = _StreamUse(self._api, event, self._number)

    def _start_on_thread(self, ticket: Ticket) -> None:
        regions = [region for region in (ticket.source, ticket.target) if region.tier is Tier.HOST]
        self._disk.start(ticket, self._before(regions, [ticket.target]))

    def _before(self, regions: Sequence[Region], written: Sequence[Region]) -> Callable[[], None]:
        """Called on another thread: waits for copies from and to HOST regions that were issued until now."""
        pending = [dict[object, Use](region.uses) for region in regions]  # later copies wait for this one

        def before() -> None:
            for uses in pending:
                settle_uses(uses)
            for region in regions:
                self._api.host_uses(region, writes=region in written)

        return before


def _settle(region: Region) -> None:
    settle_uses(region.uses)
    region.uses.clear()
