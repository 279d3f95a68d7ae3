"""Divide and conquer with binomial cuts (Siskind & Pearlmutter 2018; Griewank 1992)."""

from collections.abc import Iterable
from math import comb
from typing import Literal

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Node, Schedule
from tapestream.planners._fit import by_seconds, first_fit, positive
from tapestream.planners._recurrences import Part, counts, divide, reach, repetitions

NAME = "binomial"
Rule = Literal["fixed_space", "fixed_time", "logarithmic"]


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    rule: Rule = "fixed_space",
    slots: int | None = None,
    repetitions: int | None = None,
) -> Schedule:
    """Cut an interval of L stages at ceil(t L / (s + t)), right part first, with s slots and t repetitions left.

    "fixed_space": ``slots`` given, t the least that covers the chain (C(s+t, t) >= n). "fixed_time": ``repetitions``
    given, s the least. "logarithmic": s = t, both the least. Left out, the number is the fastest of a fixed list that
    fits the budget; without a budget as many slots as stages, or one repetition. Where the published cut is not among
    the optimal ones it is moved to the nearest that is (ours; as published up to 16% more forwards), so that
    n + P(n, s) forwards are reached, as by `revolve`, at every length. Cuts ignore bytes and seconds. The tree has at
    most about s * t nodes beside the first sweep. Raises BudgetError when nothing fits, InputError for an unknown rule
    or for a number that the rule does not take.
    """
    n = len(profile)
    taken = {"fixed_space": "slots", "fixed_time": "repetitions", "logarithmic": None}
    if rule not in taken:
        raise InputError(f"{NAME}: rule is one of {', '.join(taken)}, not {rule!r}")
    for knob, value in (("slots", slots), ("repetitions", repetitions)):
        if value is not None and knob != taken[rule]:
            raise InputError(
                f"{NAME}: rule {rule!r} finds {knob} itself; leave {knob}={value!r} out or change the rule"
            )
    if rule == "logarithmic":
        numbers = [next(s for s in range(1, n + 1) if comb(2 * s, s) >= n)]
    elif rule == "fixed_time":
        times = counts(n) if repetitions is None else [positive(NAME, "repetitions", repetitions, n)]
        numbers = [least_slots(n, t) for t in times]
    else:
        numbers = sorted(counts(n), reverse=True) if slots is None else [positive(NAME, "slots", slots, n)]
    trees: Iterable[Node] = (divide(n, s, _cut) for s in numbers)
    if len(numbers) > 1 and not profile.is_uniform:  # more slots need not be faster
        trees = (root for _, root in by_seconds(trees, profile))
    return first_fit(NAME, trees, profile, budget)


def timed(profile: Profile) -> list[tuple[float, Node]]:
    """Seconds and trees of rule "fixed_space" with a fixed list of slot counts, fastest first."""
    return by_seconds((divide(len(profile), slots, _cut) for slots in counts(len(profile))), profile)


def least_slots(n: int, t: int) -> int:
    """The fewest slots with which no stage is advanced more than ``t`` times: C(s + t, s) >= n."""
    return repetitions(n, t)  # C(s + t, s) is the same with s and t exchanged


def _cut(part: Part) -> tuple[Part, Part] | None:
    n, slots = part.length, part.slots
    if n == 1:
        return None
    t = repetitions(n, slots)
    least = max(1, reach(slots, t - 2), n - reach(slots - 1, t))
    most = min(reach(slots, t - 1), n - reach(slots - 1, t - 1))
    left = min(max(-(-t * n // (slots + t)), least), most)
    return Part(left, slots), Part(n - left, slots - 1)
