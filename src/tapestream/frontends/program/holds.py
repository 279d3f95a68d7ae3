"""Parts of what stretches make kept from the first sweep, so that what makes them does not run again.

A stretch that is run again for what it saves need not make what is there (see `Needed`). With the results of its
products and convolutions kept, only what is cheap runs again: activations, normalisations, reshapes; with what an
operation has itself made of what it saves (the sums of an attention, the mean of a normalisation) and its results, it
does not run either. They belong to the restart checkpoint before the stretch, which is that much larger.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.frontends.program.cuts import Borders, Piece
from tapestream.frontends.program.fit import most_that_fit
from tapestream.ir import Action, Backward, Free, Keep, Phase, PhaseKind, Record, Restore
from tapestream.planning.plan import Plan

_LONGEST = 200  # operations of a stretch that is looked at
_MOST = 40  # pieces of one
_NEAR = 12  # operations between two pieces


class Holding(NamedTuple):
    """What is held: values, and operations of which what they have made themselves of what they save; each with the
    operation before which the restart checkpoint stands that it belongs to."""

    values: Mapping[int, int] = {}
    saves: Mapping[int, int] = {}

    def at(self, operation: int) -> tuple[set[int], set[int]]:
        """What belongs to the restart checkpoint there."""
        values, saves = ({one for one, at in held.items() if at == operation} for held in self)
        return values, saves


NOTHING = Holding()


@dataclass(frozen=True, slots=True)
class _Held:
    """A piece of stretch ``stage``: bytes to keep it, seconds that this saves, both beside those before it."""

    stage: int
    piece: Piece
    nbytes: int
    seconds: float


class Holds:
    """Those of the stretches between ``cuts``."""

    def __init__(self, cuts: Sequence[int], borders: Borders) -> None:
        self._cuts, self.borders = cuts, borders
        self._found: dict[tuple[int, bool], list[_Held]] = {}

    def added(self, plan: Plan, budget: int) -> tuple[Plan, Holding] | None:
        """``plan`` with as many pieces kept as fit into ``budget`` bytes, those first that save the most seconds for a
        byte, and these; None where none fits."""
        held = list(self._in_order(_run_again_once(list(plan.schedule)), plan.profile))
        found = most_that_fit(held, lambda some: _judged(plan, some, budget))
        if found is None:
            return None
        better, chosen = found
        values = {number: self._cuts[one.stage] for one in chosen for number in one.piece.values}
        saves = {k: self._cuts[one.stage] for one in chosen for k in one.piece.operations}
        return better, Holding(values, saves)

    def _in_order(self, stages: Sequence[int], profile: Profile) -> Iterator[_Held]:
        """Of all these stretches, the most seconds for a byte first; of each in its own order. Of equals the later one,
        which backward has done with earlier."""
        once = set(stages)
        # What the next restart checkpoint holds, too, goes no later than when it is made again otherwise.
        shared = {k for k in stages if k + 1 in once and profile.stages[k + 1].reads_input}
        waiting = [(0.0, -stage, self._of(stage, shared=stage in shared)) for stage in stages]
        waiting = [(one[0].nbytes / one[0].seconds, later, one) for _, later, one in waiting if one]
        heapify(waiting)
        while waiting:
            _, later, (first, *rest) = heappop(waiting)
            yield first
            if rest:
                heappush(waiting, (rest[0].nbytes / rest[0].seconds, later, rest))

    def _of(self, stage: int, *, shared: bool) -> list[_Held]:
        if (stage, shared) not in self._found:
            a, b, borders = self._cuts[stage], self._cuts[stage + 1], self.borders
            free = borders.alive_at(b) if shared and b - a <= _LONGEST else frozenset[int]()
            self._found[stage, shared] = list(self._best(stage, free))
        return self._found[stage, shared]

    def _best(self, stage: int, held: Set[int]) -> Iterator[_Held]:
        """One piece after the other, each the one that then saves the most for a byte; ``held``: storages that are
        there anyway. What one saves is asked again when another one near to it has been taken."""
        a, b, borders = self._cuts[stage], self._cuts[stage + 1], self.borders
        if b - a > _LONGEST:
            return
        left, again = borders.may_be_held(a, b), borders.asked(a, b)
        ask, price, taken = left, dict[Piece, float](), 0  # seconds saved for a byte
        while left and taken < _MOST:
            for piece in ask:
                price[piece] = again.saved_by(piece.values, piece.operations) / (piece.beside(held) + 1)
            best = max(left, key=price.__getitem__)
            seconds, nbytes = again.saved_by(best.values, best.operations), best.beside(held)
            if seconds / (nbytes + 1) < price[best]:  # something far from it has been taken that saves the same
                ask = [best]
                continue
            if seconds <= 0:
                return
            again.saved_by(best.values, best.operations, there=True)
            yield _Held(stage, best, nbytes, seconds)
            left.remove(best)
            held, taken = held | best.storages.keys(), taken + 1
            ask = [piece for piece in left if abs(piece.made_by - best.made_by) <= _NEAR]


def _judged(plan: Plan, held: Sequence[_Held], budget: int) -> Plan | None:
    profile, nbytes = plan.profile, Counter[int]()
    for one in held:
        nbytes[one.stage] += one.nbytes
    for stage, more in nbytes.items():
        profile = _with_larger_state(profile, stage, more)
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
