"""Stretches that a plan records one after the other, and then reverses, as one: what is kept in one of them for its end
(see `Tails`, `Holds`) may then be anything in all of them. Memory is the same: what a stretch saves goes while it is
reversed.
"""

import contextlib
from collections.abc import Sequence
from itertools import pairwise

from tapestream.costs import Budget
from tapestream.errors import BudgetError, ScheduleError
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.orders import renumbered
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Phase,
    PhaseKind,
    Record,
    Restore,
    Schedule,
    Series,
    Value,
)
from tapestream.planning.plan import Plan


def merged(plan: Plan, cuts: Sequence[int], borders: Borders, budget: int) -> tuple[Plan, Sequence[int]] | None:
    """``plan`` with such stretches as one each, and where its stretches begin then; None where there are none, or where
    ``budget`` bytes do not suffice."""
    actions = list(plan.schedule)
    groups = _groups(actions)
    inside = {border for first, end in groups for border in range(first + 1, end)}
    inside -= _named(actions, inside)
    if not inside:
        return None
    fewer = [cut for stage, cut in enumerate(cuts) if stage not in inside]
    with contextlib.suppress(BudgetError, ScheduleError):
        schedule = _rewritten(actions, len(cuts) - 1, inside, plan.planner)
        return Plan.judged(schedule, borders.profile(fewer), Budget(budget), None, plan.alternatives), fewer
    return None


def _groups(actions: Sequence[Action]) -> list[tuple[int, int]]:
    """First and end of the stretches that are recorded in their order and then reversed, nothing else in between."""
    back = actions[actions.index(Phase(PhaseKind.BACKWARD)) :]
    found, at = list[tuple[int, int]](), 0
    while at < len(back):
        first, end = at, at + 1
        if isinstance(back[at], Record):
            while end < len(back) and isinstance(back[end], Record):
                end += 1
            stages = [a.stage for a in back[first:end] if isinstance(a, Record)]
            following = [a.stage for a in back[end : end + len(stages)] if isinstance(a, Backward)]
            if following == stages[::-1] and all(b == a + 1 for a, b in pairwise(stages)):
                found.append((stages[0], stages[-1] + 1))
        at = end
    return found


def _named(actions: Sequence[Action], inside: set[int]) -> set[int]:
    """Those of the borders ``inside`` at which something else begins, ends, or is kept."""
    found = set[int]()
    turned = False
    for action in actions:
        match action:
            case Phase(kind):
                turned = kind is PhaseKind.BACKWARD
            case Forward(start, stop):
                found |= {start, stop} & inside
            case Keep(stage) | Restore(stage) | Free(Value(Kind.STATE, stage)):
                found |= {stage} & inside
            case Record(stage) if not turned:
                found |= {stage, stage + 1} & inside
            case _:
                pass
    return found


def _rewritten(actions: Sequence[Action], n: int, inside: set[int], planner: str) -> Schedule:
    """The same without the borders ``inside``. See `renumbered`."""
    place, at = [], 0
    for border in range(n + 1):
        place.append(at)
        at += border + 1 not in inside
    dropped = [isinstance(a, Record | Backward) and a.stage in inside for a in actions]
    out = tuple(renumbered(action, place) for action, gone in zip(actions, dropped, strict=True) if not gone)
    return Schedule(Series(out), place[n], planner=planner)
