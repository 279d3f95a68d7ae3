"""Binomial checkpointing (Griewank & Walther 2000, "Algorithm 799: revolve")."""

from collections.abc import Iterable
from functools import lru_cache

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Node, Schedule
from tapestream.planners._fit import by_seconds, device_limit, device_peak, first_fit, first_timed_fit, positive
from tapestream.planners._recurrences import binomial_cut, counts, divide

NAME = "revolve"
_SHORT = 64
"""Stages."""


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
) -> Schedule:
    """Fewest forwards for a number of restart checkpoints: n + P(n, slots), P(n, s) = t n - beta(s + 1, t - 1).

    ``slots`` counts the slot of state 0 and not the live state. Left out, it is the most that the budget holds on equal
    stages; on others, the fastest of a fixed list of slot counts that fits, so more budget is never slower. No stage is
    advanced more than t times. Optimal in forwards for equal stages; bytes and seconds of unequal stages do not move
    the cuts (`rotor` does that). The tree has at most about slots * t nodes beside the first sweep.
    Raises BudgetError when nothing fits, InputError for slots below 1.
    """
    n = len(profile)
    if slots is not None:
        candidates: Iterable[Node] = [binomial(n, positive(NAME, "slots", slots, n))]
    elif profile.is_uniform:
        candidates = [binomial(n, _most_slots(profile, device_limit(budget)))]
    else:
        return first_timed_fit(NAME, timed, profile, budget)
    return first_fit(NAME, candidates, profile, budget)


def binomial(n: int, slots: int) -> Node:
    """The tree of binomial checkpointing on ``n`` stages. Trees of short chains are remembered: programs ask for those
    of the same few lengths again and again."""
    return _remembered(n, slots) if n <= _SHORT else divide(n, slots, binomial_cut)


@lru_cache(maxsize=2048)
def _remembered(n: int, slots: int) -> Node:
    return divide(n, slots, binomial_cut)


def _most_slots(profile: Profile, limit: int | None) -> int:
    """The most slots that fit on equal stages, 1 when none do: one slot less saves one state at most, so steps of the
    excess over the size of a state never pass the answer."""
    n, state = len(profile), profile.state_nbytes(0)
    if limit is None or state == 0:
        return n
    slots = max(1, min(n, limit // state))
    while slots > 1 and (excess := device_peak(binomial(n, slots), profile) - limit) > 0:
        slots -= min(slots - 1, max(1, excess // state))
    return slots


def timed(profile: Profile) -> list[tuple[float, Node]]:
    """Seconds and trees of a fixed list of slot counts, fastest first."""
    return by_seconds((binomial(len(profile), slots) for slots in counts(len(profile))), profile)
