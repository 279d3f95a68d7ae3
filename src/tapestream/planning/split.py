"""Splitting the device budget between the tape, values that stay there, and blocks that pass through."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from math import ceil

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError
from tapestream.ir import Forward, Schedule, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.passes.keep import kept_between
from tapestream.passes.memory import block_values, compute_seconds
from tapestream.passes.parameters import stream_parameters
from tapestream.passes.residency import UpdateMode, splits_a_pair, with_gradients, worthiest_first
from tapestream.passes.stays import Occupancy, Stay
from tapestream.passes.streaming import Streaming
from tapestream.simulate import Simulation, simulate

_SHORT = 200  # stages; longer chains get less of the search below
_LEVELS = (5, 3)  # tape budgets tried, for short and for long chains
_AS_FAST = 1.02  # plans within 2% of the fastest count as equally fast
_SIMULATIONS = (24, 4)  # at most, for each planner


@dataclass(frozen=True, slots=True)
class Terms:
    """What every split has in common."""

    profile: Profile
    budget: Budget
    machine: Machine | None
    home: HomeTiers
    update: UpdateMode
    resident: frozenset[Value] | None
    accumulate: bool

    @property
    def apart(self) -> bool:
        """A GPU: users must see a parameter and its gradient on one device."""
        return self.machine is not None and (Tier.HOST, Tier.DEVICE) in self.machine.links

    @property
    def across(self) -> bool:
        """Whether values may be on the device where one phase ends and the next begins without living there."""
        free = self.resident is None and not self.accumulate
        return free and not self.apart and self.update is not None


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that fits, judged."""

    schedule: Schedule
    simulation: Simulation
    resident: frozenset[Value]

    @property
    def seconds(self) -> float:
        return self.simulation.makespan_seconds


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tape and a choice of resident values; no schedule made of them takes less than ``bound_seconds``."""

    streaming: Streaming
    resident: frozenset[Value]
    stays: list[Stay]
    bound_seconds: float

    @property
    def moved_nbytes(self) -> int:
        """Bytes that cross links in a step."""
        return sum(stay.nbytes * (max(0, len(path) - 1)) for stay in self.stays for path in (stay.arrive, stay.leave))


def best_split(tape: Callable[[Budget], Schedule], terms: Terms, faster_than: float = float("inf")) -> Found | None:
    """The fastest schedule found for the tapes that one planner makes, None when no bound is below ``faster_than``.

    ``tape``: the planner, for a device budget of the tape alone. Tries a few tape budgets between the least it
    can and all that is there; for each, resident values that leave room for none, one or two more blocks in
    flight, for half of what is left or for none at all. Simulates in order of a lower bound (computation, and
    bytes of each lane, phase by phase), a bounded number of times. Raises BudgetError with the least device
    budget when nothing fits.
    """
    if _surely_slower(tape, terms, faster_than):
        return None
    streamings: dict[tuple[int, int, float], Streaming] = {}
    leanest: Streaming | None = None
    before: Schedule | None = None
    for schedule in _tapes(tape, terms):
        if schedule != before:
            before, leanest = schedule, _streaming(schedule, terms)
            looks = len(leanest.computation), int(leanest.base.during.max()), _compute(leanest)
            leanest = streamings.setdefault(looks, leanest)
    worth_it = [(looks[2], streaming) for looks, streaming in streamings.items() if looks[2] < faster_than]
    ordered = _in_order(worth_it, terms)
    first = next(((bound, candidate) for bound, candidate in ordered if candidate is not None), None)
    if first is not None:
        return _fastest(chain([first], ordered), terms, faster_than)
    if leanest is not None and len(worth_it) == len(streamings):
        raise _too_small(leanest, terms)
    return None


def _surely_slower(tape: Callable[[Budget], Schedule], terms: Terms, seconds: float) -> bool:
    """Whether the planner's computation takes ``seconds`` with all the bytes that a tape could have, so with fewer."""
    limit = terms.budget.device_nbytes
    if limit is None or seconds == float("inf"):
        return False
    try:
        return sum(compute_seconds(action, terms.profile) for action in tape(Budget(limit))) >= seconds
    except BudgetError:
        return False


def _in_order(tapes: list[tuple[float, Streaming]], terms: Terms) -> Iterator[tuple[float, _Candidate | None]]:
    """Candidates with their bounds, the least first. None, with the seconds of its computation, announces a tape: all
    that follows takes as long at least, and its choices are made for those who go on."""
    queue: list[tuple[float, int, int, int, _Candidate | Streaming]]
    queue = [(seconds, -1, number, 0, streaming) for number, (seconds, streaming) in enumerate(tapes)]
    heapify(queue)
    while queue:
        bound, _, number, _, item = heappop(queue)
        if isinstance(item, _Candidate):
            yield bound, item
            continue
        yield bound, None
        for place, one in enumerate(_choices(item, terms)):
            heappush(queue, (one.bound_seconds, one.moved_nbytes, number, place, one))


def _fastest(ordered: Iterator[tuple[float, _Candidate | None]], terms: Terms, faster_than: float) -> Found | None:
    tried: list[tuple[Found, _Candidate]] = []
    best: Found | None = None
    refused: BudgetError | None = None
    number, most = -1, _SIMULATIONS[len(terms.profile) > _SHORT]
    for bound, candidate in ordered:
        to_beat = faster_than if best is None else min(faster_than, best.seconds)
        if bound >= to_beat * _AS_FAST:
            break
        if candidate is None:
            continue
        number += 1
        if best is not None and number >= most:
            break
        try:
            found = _early_or_just_in_time(candidate, terms)
        except BudgetError as error:  # of the host or the disk: the device's was looked at before
            refused = error.with_traceback(None)
            continue
        tried.append((found, candidate))
        if best is None or found.seconds < best.seconds:
            best = found
    if best is not None:
        # Where time is the same, less traffic is better: disks wear, and copies take memory bandwidth from computation.
        as_fast = [pair for pair in tried if pair[0].seconds <= _AS_FAST * best.seconds]
        best, chosen = min(as_fast, key=lambda pair: (sum(pair[0].simulation.bytes_moved.values()), pair[0].seconds))
        plain = _judged(chosen, terms, None)  # no overlap: faster where a link hates traffic in both directions
        return plain if plain.seconds < best.seconds else best
    if refused is not None:
        raise BudgetError(str(refused), stage=refused.stage)  # its least bytes are not the device's
    return None


def best_resident(tape: Callable[[Budget], Schedule], terms: Terms) -> Found:
    """The fastest schedule with every parameter block on the device; the tape gets what they leave.

    Keeps the schedule's tree. Raises BudgetError with a device budget that works when nothing fits.
    """
    gradients, others = _sums(terms.profile)
    limit = terms.budget.device_nbytes
    if limit is None:
        return _on_device(tape(Budget()), terms)
    least = _least(tape)
    for nbytes in (limit - others, limit - others - gradients):
        if nbytes > least:
            with suppress(BudgetError):
                return _on_device(tape(Budget(nbytes)), terms)
    return _on_device(tape(Budget(least)), terms)


def _on_device(schedule: Schedule, terms: Terms) -> Found:
    schedule = stream_parameters(
        schedule, terms.profile, None, terms.machine,
        home=Tier.DEVICE, update=terms.update, accumulate=terms.accumulate,
    )  # fmt: skip
    return Found(schedule, simulate(schedule, terms.profile, terms.machine, terms.budget), frozenset())


def _least(tape: Callable[[Budget], Schedule]) -> int:
    """The least tape budget that the planner says it can do with."""
    try:
        tape(Budget(1))
    except BudgetError as error:
        if error.least_nbytes is None:
            raise
        return error.least_nbytes
    return 1


def _tapes(tape: Callable[[Budget], Schedule], terms: Terms) -> Iterator[Schedule]:
    """The planner's schedules for a few tape budgets, largest first, the least that it can last."""
    limit = terms.budget.device_nbytes
    if limit is None:
        yield tape(Budget())
        return
    least = _least(tape)
    for nbytes in _levels(least, limit, terms):
        try:
            yield tape(Budget(nbytes))
        except BudgetError:
            continue


def _levels(least: int, limit: int, terms: Terms) -> list[int]:
    """Tape budgets from all that could be had down to ``least``: beside everything resident, and evenly in between."""
    gradients, others = _sums(terms.profile)
    kept = 0
    if terms.resident is not None:
        kept = sum(n for value, n in block_values(terms.profile) if value in terms.resident)
    largest = max((b.parameters_nbytes + b.buffers_nbytes for b in terms.profile.blocks), default=0)
    highest = max(least, limit - kept - largest)
    count = _LEVELS[len(terms.profile) > _SHORT]
    ratio = (least / highest) ** (1 / (count - 1))
    levels = {ceil(highest * ratio**i) for i in range(count)} | {limit - others, limit - others - gradients, least}
    return sorted((nbytes for nbytes in levels if nbytes >= least), reverse=True)


def _sums(profile: Profile) -> tuple[int, int]:
    """Bytes of all gradients, and of all other block values."""
    gradients = sum(block.gradient_nbytes for block in profile.blocks)
    return gradients, sum(nbytes for _, nbytes in block_values(profile)) - gradients


def _streaming(schedule: Schedule, terms: Terms) -> Streaming:
    return Streaming.of(
        schedule, terms.profile, terms.machine, home=terms.home, update=terms.update, accumulate=terms.accumulate
    )


def _choices(streaming: Streaming, terms: Terms) -> Iterator[_Candidate]:
    """The tape with several choices of what stays on the device, none when it does not fit at all."""
    limit, computation, base = terms.budget.device_nbytes, streaming.computation, streaming.base
    for resident, allowed in _residents(streaming, terms):
        stays = streaming.stays(resident)
        if limit is not None and int(Occupancy(base, stays).nbytes.max()) > limit:
            continue
        kept = kept_between(computation, stays, base, allowed, across=terms.across)
        there = {stay.value for stay in kept if stay.start == 0 and stay.stop == len(computation) - 1}
        yield _Candidate(streaming, resident | there, kept, _bound(streaming, kept))


def _largest(profile: Profile) -> int:
    """Bytes that a run needs of the largest block."""
    return max((block.parameters_nbytes + block.buffers_nbytes for block in profile.blocks), default=0)


def _residents(streaming: Streaming, terms: Terms) -> list[tuple[frozenset[Value], int | None]]:
    """Values that never leave the device, and bytes up to which others may stay between uses, for a few amounts of room
    left to blocks in flight."""
    limit = terms.budget.device_nbytes
    if terms.resident is not None:
        return [(terms.resident, limit)]
    order = worthiest_first(terms.profile, None if terms.accumulate else terms.update)
    if terms.apart:
        order = with_gradients(order)
    if limit is None:
        return [(frozenset(order), None)]
    block = _largest(terms.profile)
    if terms.across:  # what stays throughout is chosen together with the rest
        spare = limit - int(Occupancy(streaming.base, streaming.stays(frozenset())).nbytes.max())
        return [(frozenset(), limit - window) for window in (0, block, 2 * block, spare // 2, spare)]
    peaks = _peaks(streaming, order)
    spare = limit - peaks[0]
    counts = {bisect_right(peaks, limit - window) - 1 for window in (0, block, 2 * block, spare // 2, spare)}
    if terms.apart:
        counts = {count - splits_a_pair(order, count) for count in counts}
    return [(frozenset(order[:count]), limit) for count in sorted(counts, reverse=True) if count >= 0]


def _peaks(streaming: Streaming, order: list[Value]) -> list[int]:
    """Device bytes at the peak with the first 0, 1, 2, .. values of ``order`` resident, the rest just in time."""
    held = Occupancy(streaming.base, streaming.stays(frozenset()))
    peaks = [int(held.nbytes.max())]
    for value in order:
        for stay in streaming.stays_of(value, resident=False):
            held.add(stay, -1)
        for stay in streaming.stays_of(value, resident=True):
            held.add(stay)
        peaks.append(int(held.nbytes.max()))
    return peaks


def _compute(streaming: Streaming) -> float:
    return sum(compute_seconds(action, streaming.profile) for action in streaming.computation)


def _bound(streaming: Streaming, stays: list[Stay]) -> float:
    """Seconds that no schedule with these stays can beat: the busiest of compute and the pairs of copy lanes."""
    compute, machine = _compute(streaming), streaming.machine
    if machine is None:
        return compute
    lanes: defaultdict[tuple[Tier, Tier], list[int]] = defaultdict(list)
    for stay in stays:
        for lane in (*pairwise(stay.arrive), *pairwise(stay.leave)):
            lanes[lane].append(stay.nbytes)
    return max(
        [compute, *(_pair_seconds(machine, lane, copies, lanes.get(lane[::-1], [])) for lane, copies in lanes.items())]
    )


def _pair_seconds(machine: Machine, lane: tuple[Tier, Tier], copies: list[int], back: list[int]) -> float:
    """Both directions between two tiers, one after the other or, as far as that is faster, together."""
    ahead, behind = machine.link(*lane), machine.link(*lane[::-1])
    together = min(sum(copies) / ahead.mixed, sum(back) / behind.mixed)
    # In each second together, so many seconds of copies alone are done.
    done = ahead.mixed / ahead.bytes_per_second + behind.mixed / behind.bytes_per_second
    return sum(map(ahead.seconds, copies)) + sum(map(behind.seconds, back)) - together * max(0.0, done - 1)


def _early_or_just_in_time(candidate: _Candidate, terms: Terms) -> Found:
    """With copies early; where these meet on their way through the host and do not fit, just in time."""
    try:
        return _judged(candidate, terms, terms.budget)
    except BudgetError:
        return _judged(candidate, terms, None)


def _judged(candidate: _Candidate, terms: Terms, budget: Budget | None) -> Found:
    schedule = candidate.streaming.issued(candidate.stays, budget, across=terms.across)
    return Found(schedule, simulate(schedule, terms.profile, terms.machine, terms.budget), candidate.resident)


def _too_small(leanest: Streaming, terms: Terms) -> BudgetError:
    """The least device budget that the planner can do with, parameters just in time."""
    nbytes = Occupancy(leanest.base, leanest.stays(terms.resident or frozenset())).nbytes
    position = int(nbytes.argmax())
    action = leanest.computation[position]
    stage = action.start if isinstance(action, Forward) else getattr(action, "stage", None)
    return BudgetError(f"{action} needs {nbytes[position]} bytes", least_nbytes=int(nbytes[position]), stage=stage)
