"""Segments of equal cost (Chen, Xu, Zhang, Guestrin 2016, "Training deep nets with sublinear memory cost")."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, groupby
from math import isqrt

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Forward, Keep, Node, Phase, PhaseKind, Repeat, Restore, Schedule, Series
from tapestream.planners._fit import device_peak, first_fit, first_timed_fit, positive
from tapestream.planners._recurrences import counts, freed, recorded, reversed_stages, turn

NAME = "periodic"

Lengths = list[tuple[int, int]]
"""Segments from the first to the last: (length, how many such segments follow each other)."""


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    segments: int | None = None,
    slots: int | None = None,
) -> Schedule:
    """Keep the first state of each segment, recompute each segment once, but the last, which is recorded in the sweep.

    ``slots`` restart checkpoints make ``slots + 1`` segments; give one of both. On equal stages segments differ by at
    most one stage, the last being the longest; on unequal ones the better, by simulated peak, of equal counts and of
    a balance of bytes (ours: least cap X such that state and tape of a segment, plus the states kept before it, stay
    under X). Without either knob: the fewest recomputed seconds that fit the budget, over a fixed list of counts, or
    without a budget about sqrt(n) segments, the paper's choice. Not optimal in bytes or seconds.
    Raises BudgetError when nothing fits, InputError for knobs out of range or both given.
    """
    n = len(profile)
    if segments is not None and slots is not None:
        raise InputError(
            f"{NAME}: segments={segments} and slots={slots} say the same thing twice; leave one of them out"
        )
    if slots is not None:
        segments = positive(NAME, "slots", slots, n) + 1
    if segments is None and Budget.of(budget).device_nbytes is None:
        segments = isqrt(n)
    if segments is not None:
        trees: Iterable[Node] = [_best(profile, positive(NAME, "segments", segments, n))]
    elif profile.is_uniform:
        trees = (_tree(n, _equal(n, count)) for count in counts(n))
    else:
        return first_timed_fit(NAME, timed, profile, budget)
    return first_fit(NAME, trees, profile, budget)


def _equal(n: int, segments: int) -> Lengths:
    short, longer = divmod(n, segments)
    return [(length, count) for length, count in ((short, segments - longer), (short + 1, longer)) if count]


def _best(profile: Profile, segments: int) -> Node:
    """Of the two ways to cut into that many segments, the one of least peak."""
    n = len(profile)
    equal = _tree(n, _equal(n, segments))
    if profile.is_uniform or segments == 1:
        return equal
    balanced = _tree(n, _balanced(profile, segments))
    return min(equal, balanced, key=lambda root: device_peak(root, profile))


def timed(profile: Profile) -> list[tuple[float, Node]]:
    """Seconds and trees of both cuts for every count, those with most seconds in the last segment, which is never
    recomputed, first."""
    n = len(profile)
    prefix = list(accumulate((cost.forward_seconds for cost in profile.stages), initial=0.0))
    always = sum(cost.recorded_seconds + cost.backward_seconds for cost in profile.stages) + profile.turn_seconds
    cuts = [lengths for count in counts(n) for lengths in (_equal(n, count), _balanced(profile, count))]
    cuts.sort(key=lambda lengths: prefix[n - lengths[-1][0]])
    return [(always + prefix[n - lengths[-1][0]], _tree(n, lengths)) for lengths in cuts]


def _balanced(profile: Profile, segments: int) -> Lengths:
    """The least cap, found by halving, under which filling segments from the left needs no more than ``segments``."""
    tape = list(accumulate((cost.saved_nbytes + cost.output_nbytes for cost in profile.stages), initial=0))
    low, high = -1, tape[-1] + sum(profile.state_nbytes(k) for k in range(len(profile)))
    best = _filled(profile, tape, high)
    while high - low > max(1, high >> 20):
        middle = (low + high) // 2
        cut = _filled(profile, tape, middle, segments)
        low, high, best = (middle, high, best) if cut is None else (low, middle, cut)
    assert best is not None  # the first cap takes the whole chain in one segment
    return [(length, len(list(same))) for length, same in groupby(best)]


def _filled(profile: Profile, tape: list[int], cap: int, segments: int = 1) -> list[int] | None:
    """Lengths of segments, each as long as ``cap`` bytes allow; None where more than ``segments`` are needed."""
    n, start, kept = len(profile), 0, 0
    lengths: list[int] = []
    while start < n:
        kept += profile.state_nbytes(start)
        stop = bisect_right(tape, cap - kept + tape[start]) - 1
        if stop <= start or len(lengths) == segments:
            return None
        lengths.append(stop - start)
        start = stop
    return lengths


def _tree(n: int, lengths: Lengths) -> Node:
    """The schedule with those segments; equal neighbours become one `Repeat`."""
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = []
    start = 0
    last = lengths[-1][0]
    runs = [*lengths[:-1], (last, lengths[-1][1] - 1)]
    for length, count in runs:
        if count:
            final = start + (count - 1) * length
            sweep.append(Repeat(Series((Keep(start), Forward(start, start + length))), count, length))
            back.append(Repeat(_again(final, final + length), count, -length))
            start += count * length
    return Series((*sweep, *turn(n - last, n), *reversed(back)))


def _again(start: int, stop: int) -> Node:
    """One segment recomputed and reversed."""
    return Series((Restore(start), freed(start), recorded(start, stop), reversed_stages(start, stop)))
