"""What may stay on the device beside a tape: a few choices of block values, with a bound on what a step then takes."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import accumulate

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Kind, Schedule, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.passes.host_updates import NONE_HOSTED, Hosted
from tapestream.passes.keep import kept_between
from tapestream.passes.memory import block_values
from tapestream.passes.residency import UpdateMode, splits_a_pair, with_gradients, worthiest_first
from tapestream.passes.stays import Occupancy, Stay
from tapestream.passes.streaming import Streaming
from tapestream.planning.bound import bound_seconds
from tapestream.planning.overflow import Overflow


@dataclass(frozen=True, slots=True)
class Terms:
    """What every split has in common. ``idle_nbytes``: of block values that may lie on the device while the chain does
    not run, None for no limit. ``on_disk``: values that live there because the host has no room, None where plans
    decide. ``keeps_inside``: whether runs may keep of their inside what spares a recompute time. ``hosted``: what is
    updated in HOST, where its state and weights live; only buffers of it stay on the device. ``mixes``: whether plans
    may leave some of that to the device."""

    profile: Profile
    budget: Budget
    machine: Machine | None
    home: HomeTiers
    update: UpdateMode
    resident: frozenset[Value] | None
    accumulate: bool
    idle_nbytes: int | None = None
    on_disk: frozenset[Value] | None = None
    keeps_inside: bool = False
    hosted: Hosted = NONE_HOSTED
    mixes: bool = False

    def hosting(self, hosted: Hosted) -> "Terms":
        """The same with these updated in HOST."""
        resident = self.resident
        if resident is not None:
            resident = frozenset(v for v in resident if v.index not in hosted.blocks or v.kind is Kind.BUFFERS)
        return replace(self, hosted=hosted, resident=resident)

    @property
    def apart(self) -> bool:
        """A GPU: users must see a parameter and its gradient on one device."""
        return self.machine is not None and (Tier.HOST, Tier.DEVICE) in self.machine.links

    @property
    def across(self) -> bool:
        """Whether values may be on the device where one phase ends and the next begins without living there."""
        free = self.resident is None and not self.accumulate and self.profile.shards == 1
        return free and not self.apart and self.update is not None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tape and what stays on the device. ``across``: values may be there where a phase ends and the next begins
    without living there. ``stays``: with all values where their kinds are at home; ``moving``: as they are, with values
    ``on_disk`` for which the host has no room."""

    streaming: Streaming
    resident: frozenset[Value]
    stays: list[Stay]
    across: bool
    moving: list[Stay]
    on_disk: frozenset[Value] = frozenset()

    def overflowed(self, terms: Terms, how: Overflow) -> "Candidate":
        """With what does not fit the host on the disk, chosen like that."""
        host, kinds = terms.budget.host_nbytes, terms.home.overflowing
        if host is None or not kinds or not self.streaming.from_disk:
            return self
        if terms.on_disk is None:
            update = None if terms.accumulate else terms.update
            on_disk = how.on_disk(self.streaming, self.stays, kinds, host, update)
        else:
            on_disk = terms.on_disk.intersection(self.streaming.sizes)
        moving = self.streaming.overflowed(self.stays, on_disk) if on_disk else self.stays
        return replace(self, on_disk=on_disk, moving=moving)

    def timed(self, budget: Budget | None, host_nbytes: int | None) -> tuple[Schedule, float]:
        """The schedule, with copies as early as ``budget`` allows (None: just in time), and its seconds. Raises
        BudgetError where the host has to hold more than ``host_nbytes``."""
        return self.streaming.timed(
            self.moving, budget, across=self.across, on_disk=self.on_disk, host_nbytes=host_nbytes
        )

    @property
    def forwards(self) -> int:
        """Runs of stages, recorded ones included."""
        return self.streaming.forwards

    @property
    def moved_nbytes(self) -> int:
        """Bytes that cross links in a step."""
        return self.streaming.passing_nbytes + sum(stay.moving_nbytes for stay in self.moving)


@dataclass(frozen=True, slots=True)
class _Room:
    """``resident``: values that never leave the device; ``nbytes``: up to which others may stay between uses."""

    resident: frozenset[Value]
    nbytes: int | None
    across: bool = False


def streaming_of(schedule: Schedule, terms: Terms) -> Streaming:
    """A tape with blocks that come and go on these terms."""
    return Streaming.of(
        schedule, terms.profile, terms.machine, home=terms.home, update=terms.update, accumulate=terms.accumulate,
        hosted=terms.hosted,
    )  # fmt: skip


def choices(streaming: Streaming, terms: Terms) -> Iterator[Candidate]:
    """The tape with several choices of what stays on the device, none when it does not fit at all."""
    limit, computation, base = terms.budget.device_nbytes, streaming.computation, streaming.base
    for room in _rooms(streaming, terms):
        stays = streaming.stays(room.resident)
        if limit is not None and int(Occupancy(base, stays).nbytes.max()) > limit:
            continue
        kept = kept_between(computation, stays, base, room.nbytes, across=room.across)
        lying = [stay for stay in kept if stay.start == 0 and not stay.arrive]
        if terms.idle_nbytes is not None and sum(stay.nbytes for stay in lying) > terms.idle_nbytes:
            continue
        if not _fits_host(streaming, kept, terms):
            continue
        there = {stay.value for stay in kept if stay.start == 0 and stay.stop == len(computation) - 1}
        yield Candidate(streaming, room.resident | there, kept, room.across, kept).overflowed(terms, Overflow())


def _fits_host(streaming: Streaming, stays: list[Stay], terms: Terms) -> bool:
    """Whether what lives on the host fits it, where it is said what does not."""
    host = terms.budget.host_nbytes
    if host is None or terms.on_disk is None:
        return True
    return sum(streaming.sizes[value] for value in streaming.on_host(stays) - terms.on_disk) <= host


def _rooms(streaming: Streaming, terms: Terms) -> list[_Room]:
    """For a few amounts of room left to blocks in flight."""
    limit, block = terms.budget.device_nbytes, largest_block(terms.profile)
    hosted = streaming.hosted.blocks
    if terms.resident is not None:
        return [_Room(frozenset(v for v in terms.resident if v.index not in hosted or v.kind is Kind.BUFFERS), limit)]
    order = worthiest_first(terms.profile, None if terms.accumulate else terms.update)
    order = [value for value in order if value.index not in hosted or value.kind is Kind.BUFFERS]
    if terms.apart:
        order = with_gradients(order)
    if limit is None:
        return [_Room(frozenset(order), None, terms.across)]
    peaks = _peaks(streaming, order, limit)
    if not peaks:
        return []
    spare = limit - peaks[0]
    windows = (0, block, 2 * block, spare // 2, spare)
    rooms = []
    if terms.across:  # what stays throughout is chosen together with the rest
        rooms = [_Room(frozenset(), limit - window, across=True) for window in windows]
    if not terms.across or terms.idle_nbytes is not None:
        most = _most(order, terms)
        counts = {min(most, bisect_right(peaks, limit - window) - 1) for window in windows}
        if terms.apart:
            counts = {count - splits_a_pair(order, count) for count in counts}
        rooms += [_Room(frozenset(order[:count]), limit) for count in sorted(counts, reverse=True) if count >= 0]
    return rooms


def _most(order: list[Value], terms: Terms) -> int:
    """How many of ``order`` may lie on the device while the chain does not run."""
    if terms.idle_nbytes is None:
        return len(order)
    sizes = dict(block_values(terms.profile))
    return bisect_right(list(accumulate(sizes[value] for value in order)), terms.idle_nbytes)


def largest_block(profile: Profile) -> int:
    """Bytes that a run needs of the largest block."""
    return max((block.parameters_nbytes + block.buffers_nbytes for block in profile.blocks), default=0)


def _peaks(streaming: Streaming, order: list[Value], limit: int) -> list[int]:
    """Device bytes at the peak with the first 0, 1, 2, .. values of ``order`` resident, the rest just in time; up to
    the last that is within ``limit``."""
    held = Occupancy(streaming.base, streaming.stays(frozenset()))
    peaks: list[int] = []
    for value in [None, *order]:
        if value is not None:
            held.add(streaming.stays_of(value, resident=False), -1)
            held.add(streaming.stays_of(value, resident=True))
        peak = int(held.nbytes.max())
        if peak > limit:
            break
        peaks.append(peak)
    return peaks


def in_order(tapes: list[tuple[float, Streaming]], terms: Terms) -> Iterator[tuple[float, Candidate | None]]:
    """Candidates with their bounds, the least first. None, with the seconds of its computation, announces a tape: all
    that follows takes as long at least, and its choices are made for those who go on."""
    queue: list[tuple[float, int, int, int, Candidate | Streaming]]
    queue = [(seconds, -1, number, 0, streaming) for number, (seconds, streaming) in enumerate(tapes)]
    heapify(queue)
    while queue:
        bound, _, number, _, item = heappop(queue)
        if isinstance(item, Candidate):
            yield bound, item
            continue
        yield bound, None
        for place, one in enumerate(choices(item, terms)):
            least = bound_seconds(one.streaming, one.moving)
            heappush(queue, (least, one.moved_nbytes, number, place, one))
