"""The fastest of some candidates that fits the budget of every tier, by the judge, copies and overlap included."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import MEMORIES, Node, Schedule, Tier
from tapestream.planners._fit import plain
from tapestream.planners._tiers import DEVICE, fastest_below, first_within, tier_of
from tapestream.simulate import Simulation, simulate


class Candidate(NamedTuple):
    """A schedule's tree, seconds that it cannot beat (its computation alone) and device bytes that it surely takes."""

    seconds: float
    root: Node
    nbytes: int = 0


def fastest_fit(
    name: str, candidates: Iterable[Candidate], profile: Profile, budget: Budget, machine: Machine | None
) -> Schedule:
    """The candidate of least makespan within ``budget``, the earlier of equals; they come in order of ``seconds``.

    More budget never makes it slower, provided that the candidates do not depend on the budget. Raises BudgetError,
    naming the least bytes, where none fits.
    """
    best: tuple[float, Schedule] | None = None
    refused: list[tuple[Schedule, dict[Tier, int]]] = []
    least: int | None = None  # device bytes of the leanest among those that fit all other tiers
    limit = budget.device_nbytes
    candidates = list(candidates)
    if len(candidates) == 1 and all(budget.nbytes(tier) is None for tier in MEMORIES):
        return Schedule(candidates[0].root, len(profile), planner=name)  # judging takes time in the number of stages
    for candidate in _in_turn(candidates, limit):
        if best is not None and (candidate.seconds >= best[0] or _exceeds(candidate.nbytes, limit)):
            break
        if least is not None and candidate.nbytes >= least:
            continue
        schedule = Schedule(candidate.root, len(profile), planner=name)
        judged = simulate(schedule, plain(profile), machine)
        over = [tier for tier, peak in judged.peak_nbytes.items() if _exceeds(peak, budget.nbytes(tier))]
        if not over and (best is None or judged.makespan_seconds < best[0]):
            best = judged.makespan_seconds, schedule
        elif over:
            refused.append((schedule, judged.peak_nbytes))
            if over == [DEVICE]:
                least = min(least or judged.peak_nbytes[DEVICE], judged.peak_nbytes[DEVICE])
    return best[1] if best is not None else first_within(name, refused, budget)


def is_within(judged: Simulation, budget: Budget) -> bool:
    """Whether every tier's peak is allowed."""
    limits = ((peak, budget.nbytes(tier)) for tier, peak in judged.peak_nbytes.items())
    return all(limit is None or peak <= limit for peak, limit in limits)


def _in_turn(candidates: Iterable[Candidate], limit: int | None) -> Iterator[Candidate]:
    """Those that may fit first, in the given order; then the others, the leanest first."""
    too_large: list[Candidate] = []
    for candidate in candidates:
        if _exceeds(candidate.nbytes, limit):
            too_large.append(candidate)
        else:
            yield candidate
    yield from sorted(too_large, key=lambda candidate: candidate.nbytes)


def _exceeds(nbytes: int, limit: int | None) -> bool:
    return limit is not None and nbytes > limit


def direct_tier(name: str, machine: Machine | None, tier: Tier | str | None) -> Tier:
    """``tier``, or the fastest linked to the device; InputError where ``machine`` has no link both ways."""
    target = fastest_below(machine) if tier is None else tier_of(name, tier)
    if machine is not None:
        if len(machine.route(target)) > 2:
            raise InputError(
                f"{name}: {target.name} is reached by way of HOST, and only copies on a direct link overlap with "
                "computation; use tier='host'"
            )
        machine.link(DEVICE, target)
        machine.link(target, DEVICE)
    return target
