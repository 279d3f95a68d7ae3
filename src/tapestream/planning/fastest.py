"""Of candidates the one to take: about as fast as the fastest, with the fewest runs and the least traffic."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.ir import Schedule, Value
from tapestream.passes.inside import keep_inside
from tapestream.passes.residence import idle_nbytes
from tapestream.planning.bound import serial_seconds
from tapestream.planning.choices import Candidate, Terms
from tapestream.planning.overflow import CHANGES, Overflow
from tapestream.simulate import Simulation, simulate

AS_FAST = 1.03  # plans within 3% of the fastest count as equally fast
SHORT = 200  # stages; longer chains get less of a search
_MOST_ACTIONS = 20_000  # of a schedule of which each is looked at
_SIMULATIONS = (24, 3)  # at most, for each planner
_PATIENCE = 5  # simulations that found nothing faster: bounds grow, so that it is ever less likely


class Weighed(Protocol):
    """What is known of a schedule when it is chosen or not. ``fastest``: seconds of the fastest known with it."""

    @property
    def seconds(self) -> float: ...
    @property
    def fastest(self) -> float: ...
    @property
    def forwards(self) -> int: ...
    @property
    def moved_nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate's schedule, and its seconds as they were counted when it was listed. Its bytes are still to be
    judged."""

    schedule: Schedule
    seconds: float
    candidate: Candidate

    @property
    def fastest(self) -> float:
        return self.seconds

    @property
    def forwards(self) -> int:
        return self.candidate.forwards

    @property
    def moved_nbytes(self) -> int:
        return self.candidate.moved_nbytes

    def judged(self, terms: Terms) -> "Found":
        """Raises BudgetError where it is not within the budget of ``terms``."""
        found = judged_as(self.schedule, terms, self.candidate.resident)
        return replace(found, candidate=self.candidate)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that fits, judged. ``fastest_seconds``: of the fastest that was found on the way, which may be up to
    3% faster, with more runs or more traffic. ``candidate``: what it was made of."""

    schedule: Schedule
    simulation: Simulation
    resident: frozenset[Value]
    fastest_seconds: float = float("inf")
    candidate: Candidate | None = None

    @property
    def seconds(self) -> float:
        return self.simulation.makespan_seconds

    @property
    def fastest(self) -> float:
        return min(self.seconds, self.fastest_seconds)

    @property
    def forwards(self) -> int:
        return self.simulation.forwards

    @property
    def moved_nbytes(self) -> int:
        return sum(self.simulation.bytes_moved.values())


T = TypeVar("T", bound=Weighed)


def leanest(found: Sequence[T], stages: int) -> T:
    """Of those that count as equally fast the one with the fewest runs, in quarters of ``stages``, then with the fewest
    bytes moved: disks wear, and copies take memory bandwidth from computation."""
    fastest = min(one.fastest for one in found)
    near = [one for one in found if one.seconds <= AS_FAST * fastest]
    return min(near or found, key=lambda one: (*_work(one, stages), one.seconds) if near else (0, 0, one.seconds))


def _work(found: Weighed | Candidate, stages: int) -> tuple[int, int]:
    return -(-4 * found.forwards // stages), found.moved_nbytes


def best_candidate(ordered: Iterator[tuple[float, Candidate | None]], terms: Terms, faster_than: float) -> Found | None:
    """The best of candidates that come with bounds of their seconds, the least first (None announces that all others
    take as long at least). None where none can be as fast as ``faster_than``; raises BudgetError where none fits."""
    tried: list[Found | Timed] = []
    fastest, refused = faster_than, None
    number, most = -1, _SIMULATIONS[len(terms.profile) > SHORT]
    for bound, candidate in ordered:
        if bound >= fastest * AS_FAST:
            break
        if candidate is None:
            continue
        if tried and bound >= fastest and not _leaner(candidate, tried, terms):
            continue
        number += 1
        best = min(range(len(tried)), key=lambda k: tried[k].seconds, default=0)
        if tried and (number >= most or len(tried) - best > _PATIENCE):
            break
        try:  # the first that fits is judged; of the others, the one that is taken
            found = _early_or_just_in_time(candidate, terms, judging=not tried)
        except BudgetError as error:  # of the host or the disk: the device's was looked at before
            refused = error.to_keep()
            continue
        tried.append(found)
        fastest = min(fastest, found.seconds)
    if tried:
        return _finished(_taken(tried, terms), terms)
    if refused is not None:
        raise BudgetError(refused.message, stage=refused.stage)  # its least bytes are not the device's
    return None


def _leaner(candidate: Candidate, tried: Sequence[Found | Timed], terms: Terms) -> bool:
    """Whether a candidate that is not the fastest may be taken all the same."""
    stages = terms.profile.runs
    return _work(candidate, stages) < _work(leanest(tried, stages), stages)


def _taken(tried: list[Found | Timed], terms: Terms) -> Found:
    """The one to take, judged; it knows the seconds of the fastest. One of ``tried``, at least, is judged already."""
    chosen, fastest = leanest(tried, terms.profile.runs), min(one.fastest for one in tried)
    if isinstance(chosen, Timed):
        try:
            chosen = chosen.judged(terms)
        except BudgetError:
            return _taken([one for one in tried if one is not chosen], terms)
    return replace(chosen, fastest_seconds=fastest)


def refined(found: Found, terms: Terms) -> Found:
    """The best of it and of the same with other choices of what lives on the disk."""
    candidate, how = found.candidate, Overflow()
    if candidate is None or not candidate.on_disk or terms.on_disk is not None:
        return found
    best: Found | Timed = found
    tried = [best]
    for name, values in CHANGES:
        for value in values:
            other = replace(how, **{name: value})
            with suppress(BudgetError):
                tried.append(timed(candidate.overflowed(terms, other), terms, terms.budget))
            if tried[-1].seconds >= best.seconds:
                break
            how, best = other, tried[-1]
    chosen = _taken(tried, terms)
    return chosen if chosen.schedule is found.schedule else _finished(chosen, terms)


def _finished(found: Found, terms: Terms) -> Found:
    """Without overlap where that is faster (links that hate traffic in both directions); with what runs may keep."""
    candidate = found.candidate
    assert candidate is not None
    best = found
    if serial_seconds(candidate.streaming, candidate.moving) < found.seconds:
        with suppress(BudgetError):
            plain = timed(candidate, terms, None)
            best = plain.judged(terms) if plain.seconds < found.seconds else found
    return replace(spared(best, terms), fastest_seconds=found.fastest, candidate=candidate)


def spared(found: Found, terms: Terms) -> Found:
    """The same; where bytes are left and stages run again, with what runs may keep of their inside."""
    profile, machine, limit = terms.profile, terms.machine, terms.budget.device_nbytes
    again = terms.keeps_inside and found.simulation.forwards > profile.runs
    if limit is None or not again or found.schedule.size > _MOST_ACTIONS:
        return found
    other = keep_inside(found.schedule, profile, machine, limit)
    if other is found.schedule:
        return found
    with suppress(BudgetError):  # of the host: copies meet at other times
        keeping = judged_as(other, terms, found.resident)
        return keeping if keeping.seconds < found.seconds else found
    return found


def judged_as(schedule: Schedule, terms: Terms, resident: frozenset[Value] = frozenset()) -> Found:
    """A schedule, judged. Raises BudgetError where it is not within the budget."""
    return Found(schedule, simulate(schedule, terms.profile, terms.machine, terms.budget), resident)


def _early_or_just_in_time(candidate: Candidate, terms: Terms, *, judging: bool) -> Found | Timed:
    """With copies early; where these meet on their way through the host and do not fit, just in time."""

    def found(budget: Budget | None) -> Found | Timed:
        listed = timed(candidate, terms, budget)
        return listed.judged(terms) if judging else listed

    try:
        return found(terms.budget)
    except BudgetError:
        return found(None)


def timed(candidate: Candidate, terms: Terms, budget: Budget | None) -> Timed:
    """The candidate with copies as early as ``budget`` allows (None: just in time). Raises BudgetError where the host
    has no room for what passes it, or more lies on the device between chains than ``terms`` allow."""
    schedule, seconds = candidate.timed(budget, terms.budget.host_nbytes)
    if terms.idle_nbytes is not None:
        lying = idle_nbytes(schedule, terms.profile, None if terms.accumulate else terms.update)
        if lying > terms.idle_nbytes:
            raise BudgetError(f"{lying} bytes of blocks lie on the device while the chain does not run")
    return Timed(schedule, seconds, candidate)
