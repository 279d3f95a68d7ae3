"""The ends of stretches kept from the first sweep, while their beginnings are run again.

A stretch that is run again for what it saves ends as soon as it has (see `ProgramSteps.record`). Its last operations
may save little that takes long to make: the mask of a dropout, for which the product before it has to be computed; the
input and statistics of a normalisation. With that kept from the first sweep the stretch is two: a beginning, which is
run again and ends earlier, and a tail, which never is.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tapestream.costs import Budget
from tapestream.errors import BudgetError, ScheduleError
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.fit import most_that_fit
from tapestream.frontends.program.orders import renumbered
from tapestream.ir import Action, Backward, Forward, Phase, PhaseKind, Record, Schedule, Series
from tapestream.planning.plan import Plan

_LONGEST = 24  # operations of a tail


@dataclass(frozen=True, slots=True)
class _Tail:
    """Of stretch ``stage`` from operation ``start`` on: bytes to keep it, seconds that this saves."""

    stage: int
    start: int
    nbytes: int
    seconds: float


class Tails:
    """Those of the stretches between ``cuts``."""

    def __init__(self, cuts: Sequence[int], borders: Borders) -> None:
        self._cuts, self._borders = cuts, borders
        self._best: dict[int, _Tail | None] = {}

    def added(self, plan: Plan, budget: int) -> tuple[Plan, Sequence[int]] | None:
        """``plan`` with as many tails as fit into ``budget`` bytes, those first that save the most seconds for a byte,
        and where its stretches begin; None where none fits."""
        actions = list(plan.schedule)
        back = actions[actions.index(Phase(PhaseKind.BACKWARD)) :]
        again = [a.stage for a, b in pairwise(back) if isinstance(a, Record) and isinstance(b, Backward)]
        tails = sorted(filter(None, map(self._best_of, again)), key=lambda tail: tail.nbytes / tail.seconds)
        found = most_that_fit(tails, lambda some: self._split(plan, actions, some, budget))
        return None if found is None else found[0]

    def _best_of(self, stage: int) -> _Tail | None:
        """Of a stretch that is run again for what it saves, the tail that saves the most seconds for a byte."""
        if stage not in self._best:
            a, b, borders = self._cuts[stage], self._cuts[stage + 1], self._borders
            found, whole = [], borders.needed_seconds(a, b)
            for start in range(max(a + 1, b - _LONGEST), b):
                seconds = whole - borders.needed_seconds(a, start)
                if seconds > 0 and borders.tail_allowed(a, start):
                    found.append(_Tail(stage, start, borders.tail_nbytes(start, b), seconds))
            self._best[stage] = min(found, key=lambda tail: tail.nbytes / tail.seconds, default=None)
        return self._best[stage]

    def _split(
        self, plan: Plan, actions: Sequence[Action], tails: Sequence[_Tail], budget: int
    ) -> tuple[Plan, Sequence[int]] | None:
        finer = sorted({*self._cuts, *(tail.start for tail in tails)})
        with contextlib.suppress(BudgetError, ScheduleError):
            split = frozenset(tail.stage for tail in tails)
            schedule = _rewritten(actions, len(self._cuts) - 1, split, plan.planner)
            return Plan.judged(schedule, self._borders.profile(finer), Budget(budget), None, plan.alternatives), finer
        return None


def _rewritten(actions: Sequence[Action], n: int, split: frozenset[int], planner: str) -> Schedule:
    """The same with the stages ``split`` in two, of which the second is recorded in the first sweep. See
    `renumbered`."""
    place, at = [], 0
    for stage in range(n + 1):
        place.append(at)
        at += 2 if stage in split else 1
    out: list[Action] = []
    backward = False
    for action in actions:
        match action:
            case Phase(kind):
                out.append(action)
                backward = kind is PhaseKind.BACKWARD
                if backward and n - 1 in split:
                    out.append(Backward(place[n - 1] + 1))
            case Forward(start, stop):
                inside = [] if backward else [stage for stage in range(start, stop) if stage in split]
                first = place[start]
                for stage in inside:
                    out += (Forward(first, place[stage] + 1), Record(place[stage] + 1))
                    first = place[stage] + 2
                if first < place[stop]:
                    out.append(Forward(first, place[stop]))
            case Backward(stage):
                out.append(Backward(place[stage]))
                if stage - 1 in split:
                    out.append(Backward(place[stage - 1] + 1))
            case _:
                out.append(renumbered(action, place))
    return Schedule(Series(tuple(out)), place[n], planner=planner)
