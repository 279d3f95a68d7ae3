"""Slots that hold a restart state or the saved tensors of one stage (Maddison 2024)."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Backward, Forward, Keep, Node, Phase, PhaseKind, Record, Restore, Schedule, Series
from tapestream.planners._equal import equal_stages
from tapestream.planners._fit import device_limit, device_peak, first_fit, positive
from tapestream.planners._recurrences import counts, freed, recorded, reversed_stages
from tapestream.planners.classic._grammar import Call, grow

NAME = "mixed"
_MOST_WORK = 2_000_000_000  # additions in the tables: some seconds
_NEVER = 1 << 60

Table: TypeAlias = NDArray[np.int64]


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
) -> Schedule:
    """Fewest forwards with ``slots`` slots, each of which holds a restart checkpoint or one stage's saved tensors.

    M(n, s) = n for n <= s + 1, otherwise the least of 1 + M(n-1, s-1), which records the first stage, and of
    i + M(i, s) + M(n-i, s-1): all forwards, recorded ones included. The stage that is recorded and reversed at once
    takes no slot; a record holds its input state too where backward reads it. Left out, ``slots`` is the most of
    a fixed list that the budget holds. Optimal in forwards for equal stages, the only ones taken. Where saved tensors
    are much larger than states slots are the wrong measure, and `rotor`, which counts bytes, is faster within the same
    budget. O(n^2 slots); nothing is computed where everything fits. Raises BudgetError when nothing fits, InputError
    for slots below 1, for unequal stages and for tables that would take more than some seconds.
    """
    n = len(profile)
    equal_stages(NAME, profile)
    if slots is None:
        return first_fit(NAME, _candidates(profile, device_limit(budget)), profile, budget)
    slots = positive(NAME, "slots", slots, n)
    return first_fit(NAME, [_tree(n, slots, _lefts(n, slots)[1])], profile, budget)


def least_forwards(n: int, slots: int) -> int:
    """M(n, slots)."""
    return int(_lefts(n, slots)[0][slots, n]) if n > slots + 1 else n


def _candidates(profile: Profile, limit: int | None) -> Iterator[Node]:
    """Everything stored, then fewer and fewer slots, from a number that is found not to fit or to suffice."""
    n = len(profile)
    yield _tree(n, n, np.empty(0, np.int64))
    most = n - 2  # one more stores everything
    slots = min(8, most)
    if slots < 1:
        return
    lefts = _lefts(n, slots)[1]
    while slots < most and limit is not None and device_peak(_tree(n, slots, lefts), profile) <= limit:
        slots = min(2 * slots, most)
        lefts = _lefts(n, slots)[1]
    for fewer in sorted((count for count in counts(n) if count <= slots), reverse=True):
        yield _tree(n, fewer, lefts)


def _lefts(n: int, slots: int) -> tuple[Table, Table]:
    """M by [slots, length], and the length of the left part, 0 where the first stage is recorded instead."""
    if n <= slots + 1:
        slots = 0  # nothing to choose
    if n * n * slots > _MOST_WORK:
        raise InputError(
            f"{NAME}: {n} stages with {slots} slots take too long to plan; use planner 'revolve', "
            f"or at most {_MOST_WORK // (n * n)} slots"
        )
    forwards = np.full((slots + 1, n + 1), _NEVER, np.int64)
    lefts = np.zeros((slots + 1, n + 1), np.int64)
    forwards[0, 1] = 1
    every = np.arange(n + 1)
    rows = np.arange(slots)
    for length in range(1, n + 1):
        i = every[1:length]
        if slots and length > 1:
            sums = i + forwards[1:, 1:length] + forwards[:-1, length - 1 : 0 : -1]
            best = sums.argmin(1)
            split, record = sums[rows, best], 1 + forwards[:-1, length - 1]
            forwards[1:, length] = np.minimum(split, record)
            lefts[1:, length] = np.where(record < split, 0, best + 1)
        forwards[max(1, length - 1) :, length] = length
    return forwards, lefts


class _Part(NamedTuple):
    length: int
    slots: int
    kept: bool  # its first state is kept already, in one of the slots
    turning: bool  # ends with the last stage of the chain


def _tree(n: int, slots: int, lefts: Table) -> Node:
    def expand(part: _Part) -> list[Node | Call[_Part]]:
        length, slots, kept, turning = part
        release: list[Node] = [freed(0)] if kept else []
        turn: list[Node] = [Phase(PhaseKind.BACKWARD)] if turning else []
        if length <= slots + 1:
            return [*release, recorded(0, length), *turn, reversed_stages(0, length)]
        left = int(lefts[slots, length])
        right = _Part(length - max(1, left), slots - 1, False, turning)
        if not left:
            return [*release, Record(0), Call(right, 1), Backward(0)]
        keep: list[Node] = [] if kept else [Keep(0)]
        again = _Part(left, slots, True, False)
        return [*keep, Forward(0, left), Call(right, left), Restore(0), Call(again)]

    return Series((Phase(PhaseKind.FORWARD), grow(_Part(n, slots, False, True), expand)))
