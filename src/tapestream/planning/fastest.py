"""Of candidates the one to take: about as fast as the fastest, with the fewest runs and the least traffic."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
_SIMULATIONS = (24, 4)  # at most, for each planner
_PATIENCE = 5  # simulations that found nothing faster: bounds grow, so that it is ever less likely


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
        """Seconds of the fastest found."""
        return min(self.seconds, self.fastest_seconds)


def leanest(found: Sequence[Found], stages: int) -> Found:
    """Of those that count as equally fast the one with the fewest runs, in quarters of ``stages``, then with the fewest
    bytes moved: disks wear, and copies take memory bandwidth from computation. It knows the seconds of the fastest."""
    fastest = min(one.fastest for one in found)
    near = [one for one in found if one.seconds <= AS_FAST * fastest]
    chosen = min(near, key=lambda one: (*_work(one, stages), one.seconds), default=None)
    return replace(chosen or min(found, key=lambda one: one.seconds), fastest_seconds=fastest)


def _work(found: Found, stages: int) -> tuple[int, int]:
    return _quarters(found.simulation.forwards, stages), sum(found.simulation.bytes_moved.values())


def _quarters(forwards: int, stages: int) -> int:
    return -(-4 * forwards // stages)


def best_candidate(ordered: Iterator[tuple[float, Candidate | None]], terms: Terms, faster_than: float) -> Found | None:
    """The best of candidates that come with bounds of their seconds, the least first (None announces that all others
    take as long at least). None where none can be as fast as ``faster_than``; raises BudgetError where none fits."""
    tried: list[Found] = []
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
        try:
            found = _early_or_just_in_time(candidate, terms)
        except BudgetError as error:  # of the host or the disk: the device's was looked at before
            refused = error.to_keep()
            continue
        tried.append(found)
        fastest = min(fastest, found.seconds)
    if tried:
        return _finished(leanest(tried, terms.profile.runs), terms)
    if refused is not None:
        raise BudgetError(refused.message, stage=refused.stage)  # its least bytes are not the device's
    return None


def _leaner(candidate: Candidate, tried: Sequence[Found], terms: Terms) -> bool:
    """Whether a candidate that is not the fastest may be taken all the same."""
    stages = terms.profile.runs
    work = _quarters(candidate.forwards, stages), candidate.moved_nbytes
    return work < _work(leanest(tried, stages), stages)


def refined(found: Found, terms: Terms) -> Found:
    """The best of it and of the same with other choices of what lives on the disk."""
    candidate, how, best, tried = found.candidate, Overflow(), found, [found]
    if candidate is None or not candidate.on_disk or terms.on_disk is not None:
        return found
    for name, values in CHANGES:
        for value in values:
            other = replace(how, **{name: value})
            with suppress(BudgetError):
                tried.append(judged(candidate.overflowed(terms, other), terms, terms.budget))
            if tried[-1].seconds >= best.seconds:
                break
            how, best = other, tried[-1]
    chosen = leanest(tried, terms.profile.runs)
    return chosen if chosen.schedule is found.schedule else _finished(chosen, terms)


def _finished(found: Found, terms: Terms) -> Found:
    """Without overlap where that is faster (links that hate traffic in both directions); with what runs may keep."""
    candidate = found.candidate
    assert candidate is not None
    best = found
    if serial_seconds(candidate.streaming, candidate.moving) < found.seconds:
        with suppress(BudgetError):
            plain = judged(candidate, terms, None)
            best = plain if plain.seconds < found.seconds else found
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


def _early_or_just_in_time(candidate: Candidate, terms: Terms) -> Found:
    """With copies early; where these meet on their way through the host and do not fit, just in time."""
    try:
        return judged(candidate, terms, terms.budget)
    except BudgetError:
        return judged(candidate, terms, None)


def judged(candidate: Candidate, terms: Terms, budget: Budget | None) -> Found:
    """The candidate with copies as early as ``budget`` allows (None: just in time). Raises BudgetError where it is not
    within the budget of ``terms``."""
    schedule = candidate.issued(budget, terms.budget.host_nbytes)
    if terms.idle_nbytes is not None:
        lying = idle_nbytes(schedule, terms.profile, None if terms.accumulate else terms.update)
        if lying > terms.idle_nbytes:
            raise BudgetError(f"{lying} bytes of blocks lie on the device while the chain does not run")
    return replace(judged_as(schedule, terms, candidate.resident), candidate=candidate)
