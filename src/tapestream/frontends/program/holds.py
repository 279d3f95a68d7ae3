"""Values of stretches kept from the first sweep, so that what makes them does not run again.

A stretch that is run again for what it saves need not make what is there (see `Needed`). With the results of its
products and convolutions kept, only what is cheap runs again: activations, normalisations, reshapes. They belong to the
restart checkpoint before the stretch, which is that much larger.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.fit import most_that_fit
from tapestream.ir import Action, Backward, Free, Keep, Phase, PhaseKind, Record, Restore
from tapestream.planning.plan import Plan

_LONGEST = 100  # operations of a stretch that is looked at
_MOST = 8  # values of one


@dataclass(frozen=True, slots=True)
class _Held:
    """A value of stretch ``stage``: bytes to keep it, seconds that this saves beside those before it."""

    stage: int
    number: int
    nbytes: int
    seconds: float


class Holds:
    """Those of the stretches between ``cuts``."""

    def __init__(self, cuts: Sequence[int], borders: Borders) -> None:
        self._cuts, self._borders = cuts, borders
        self._found: dict[int, list[_Held]] = {}

    def added(self, plan: Plan, budget: int) -> tuple[Plan, dict[int, int]] | None:
        """``plan`` with as many values kept as fit into ``budget`` bytes, those first that save the most seconds for a
        byte, and by their numbers the restart checkpoints that they belong to; None where none fits."""
        held = list(self._in_order(_run_again_once(list(plan.schedule))))
        found = most_that_fit(held, lambda some: _judged(plan, some, budget))
        if found is None:
            return None
        better, chosen = found
        return better, {one.number: self._cuts[one.stage] for one in chosen}

    def _in_order(self, stages: Sequence[int]) -> Iterator[_Held]:
        """Of all these stretches, the most seconds for a byte first; of each in its own order. Of equals the later one,
        which backward has done with earlier."""
        waiting = [(0.0, -stage, self._of(stage)) for stage in stages]
        waiting = [(one[0].nbytes / one[0].seconds, later, one) for _, later, one in waiting if one]
        heapify(waiting)
        while waiting:
            _, later, (first, *rest) = heappop(waiting)
            yield first
            if rest:
                heappush(waiting, (rest[0].nbytes / rest[0].seconds, later, rest))

    def _of(self, stage: int) -> list[_Held]:
        if stage not in self._found:
            self._found[stage] = list(self._best(stage))
        return self._found[stage]

    def _best(self, stage: int) -> Iterator[_Held]:
        """One value after the other, each the one that then saves the most for a byte."""
        a, b, borders = self._cuts[stage], self._cuts[stage + 1], self._borders
        if b - a > _LONGEST:
            return
        there = set[int]()
        left, seconds = borders.may_be_held(a, b), borders.needed_seconds(a, b)
        while left and len(there) < _MOST:
            saved = {n: seconds - borders.needed_seconds(a, b, {*there, n}) for n in left}
            number = max(left, key=lambda n: saved[n] / left[n])
            if saved[number] <= 0:
                return
            yield _Held(stage, number, left.pop(number), saved[number])
            there.add(number)
            seconds -= saved[number]


def _judged(plan: Plan, held: Sequence[_Held], budget: int) -> Plan | None:
    profile = plan.profile
    for one in held:
        profile = _with_larger_state(profile, one.stage, one.nbytes)
    with contextlib.suppress(BudgetError):
        return Plan.judged(plan.schedule, profile, Budget(budget), None, plan.alternatives)
    return None


def _run_again_once(actions: Sequence[Action]) -> list[int]:
    """Stages that the first sweep keeps a restart checkpoint before, of which the only use is to record them again."""
    turn = actions.index(Phase(PhaseKind.BACKWARD))
    kept = {action.stage for action in actions[:turn] if isinstance(action, Keep)}
    back = [action for action in actions[turn:] if not isinstance(action, Free)]
    restored = [action.stage for action in back if isinstance(action, Restore)]
    found = []
    for first, second, third in zip(back, back[1:], back[2:], strict=False):
        if not (isinstance(first, Restore) and isinstance(second, Record) and isinstance(third, Backward)):
            continue
        if first.stage == second.stage and first.stage in kept and restored.count(first.stage) == 1:
            found.append(first.stage)
    return found


def _with_larger_state(profile: Profile, stage: int, nbytes: int) -> Profile:
    """State ``stage`` with what its restart checkpoint holds besides. It counts as soon as the state is made, which is
    before the values are; where backward of the stage reads the state, what is held is no longer saved as well."""
    stages = list(profile.stages)
    one = stages[stage]
    if one.reads_input:
        saved = max(0, one.saved_nbytes - nbytes)
        extra = max(one.backward_extra_nbytes, -saved - one.cotangent_bytes)
        stages[stage] = replace(one, saved_nbytes=saved, backward_extra_nbytes=extra)
    if stage == 0:
        return replace(profile, stages=tuple(stages), initial_nbytes=profile.initial_nbytes + nbytes)
    before = stages[stage - 1]
    stages[stage - 1] = replace(before, output_nbytes=before.output_nbytes + nbytes)
    return replace(profile, stages=tuple(stages))
