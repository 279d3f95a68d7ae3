"""What the first sweep of a program keeps and what backward runs again, from a planner's schedule."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, ScheduleError
from tapestream.ir import (  # fmt: skip
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Value,
    Wait,
)
from tapestream.ir.actions import renumbered as at_places
from tapestream.ir.lowering import FORWARD, RECORD, RECORD_LAST, lowered

Plan = Callable[[Profile, Budget], Schedule]
Transfer: TypeAlias = Offload | Prefetch | Wait | Free


@dataclass(frozen=True)
class Reversal:
    """Stages before which the first sweep keeps a restart checkpoint, those that it records, and the whole schedule,
    of which backward obeys the second half, and what follows the sweep before (see `all_at_once`)."""

    kept: frozenset[int]
    recorded: frozenset[int]
    schedule: Schedule

    @functools.cached_property
    def backward(self) -> tuple[Action, ...]:
        """The backward phase."""
        actions = tuple(self.schedule)
        return actions[actions.index(Phase(PhaseKind.BACKWARD)) + 1 :]

    @functools.cached_property
    def before(self) -> tuple[Action, ...]:
        """What runs again when the first sweep has ended, before the call returns."""
        actions = tuple(self.schedule)[: -len(self.backward) - 1]
        first = next((k for k, action in enumerate(actions) if isinstance(action, Restore)), len(actions))
        return actions[first:]

    @functools.cached_property
    def rerun(self) -> Schedule:
        """What runs again, before the call returns and in backward."""
        return Schedule.of((*self.before, *self.backward), self.schedule.stages)

    def again(self, whole: Sequence[float], saves: Sequence[float]) -> float:
        """Seconds of what backward runs again: ``whole`` by stage, ``saves`` where only what it saves is asked for."""
        found = 0.0
        for row, offset in lowered(self.rerun):
            for what, place, stop, _ in row:
                if what == FORWARD:
                    found += sum(whole[place + offset : stop + offset])
                elif what in (RECORD, RECORD_LAST):
                    found += (saves if what == RECORD_LAST else whole)[place + offset]
        return found

    @functools.cached_property
    def reruns(self) -> int:
        """Stages that run again."""
        return sum(a.stop - a.start if isinstance(a, Forward) else isinstance(a, Record) for a in self.rerun)


def renumbered(action: Action, place: Sequence[int]) -> Action:
    """An action of a plan in which nothing moves, with its stages at other places. Raises ScheduleError for others."""
    match action:
        case Phase() | Forward() | Record() | Backward() | Keep() | Restore() | Free(Value(Kind.STATE)):
            return at_places(action, place)
        case _:
            raise ScheduleError(f"stages are not renumbered in a plan with {action}")


def transfers(schedule: Schedule) -> dict[int, list[Transfer]]:
    """What the first sweep does before it runs a stage, or after the last one, with what moves below the device."""
    moved = {action.value for action in schedule if isinstance(action, Offload)}
    found: dict[int, list[Transfer]] = {}
    stage = 0
    for action in schedule:
        match action:
            case Phase(PhaseKind.BACKWARD):
                break
            case Forward(_, stage):
                pass
            case Record(k):
                stage = k + 1
            case Offload(value) | Prefetch(value) | Wait(value) | Free(value) if value in moved:
                found.setdefault(stage, []).append(action)
            case _:
                pass
    return found


def of_plan(schedule: Schedule) -> Reversal:
    """A plan for the whole program."""
    kept, recorded, below = set[int](), set[int](), set[int]()
    for action in schedule:
        match action:
            case Phase(PhaseKind.BACKWARD):
                break
            case Keep(stage):
                kept.add(stage)
            case Record(stage):
                recorded.add(stage)
            case Offload(Value(Kind.STATE, index)):
                below.add(index)
            case Free(Value(Kind.STATE, index)) if index not in below:
                kept.discard(index)
            case _:
                pass
    return Reversal(frozenset(kept), frozenset(recorded), schedule)


def of_gaps(profile: Profile, starts: Sequence[int], taped: int, budget: int, plan: Plan, *, waiting: bool) -> Reversal:
    """Backward after a first sweep that has kept restart checkpoints before the stages ``starts`` (0 and others before
    ``taped``) and recorded all stages from ``taped`` on: gap by gap, each by a plan of its own within what the restart
    checkpoints before it leave of ``budget``. Raises BudgetError where a gap has no plan.

    While the last stages of a gap are run again, the cotangent of its end is there already, which plans for the gap do
    not know. With ``waiting`` they leave room for it, and go on doing so when it has been used.
    """
    n = len(profile)
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = [Phase(PhaseKind.BACKWARD), *map(Backward, reversed(range(taped, n)))]
    gaps = list(pairwise([*starts, taped])) if taped else []
    for start, end in gaps:
        sweep += (Keep(start), Forward(start, end))
    held = profile.outside_nbytes + sum(profile.state_nbytes(start) for start, _ in gaps[:-1])
    held += _gradients(profile, taped, n)
    for place, (start, end) in reversed(list(enumerate(gaps))):
        part = Profile(profile.stages[start:end], profile.state_nbytes(start))
        outside = held + (profile.cotangent_nbytes(end) if waiting else 0)
        try:
            inside = plan(part, Budget(max(1, budget - outside)))
        except BudgetError as error:
            raise BudgetError(str(error), least_nbytes=(error.least_nbytes or 0) + outside) from None
        actions = tuple(a for a in inside if not isinstance(a, Phase))
        back += (Restore(start), Free(Value(Kind.STATE, start), Tier.DEVICE), Shift(Series(actions), start))
        held += _gradients(profile, start, end) - (profile.state_nbytes(gaps[place - 1][0]) if place else 0)
    schedule = Schedule(Series((*sweep, *map(Record, range(taped, n)), *back)), n, planner="online")
    return Reversal(frozenset(start for start, _ in gaps), frozenset(range(taped, n)), schedule)


def all_at_once(profile: Profile) -> Reversal:
    """After a first sweep that has kept nothing but the state before it, all is run again and recorded before the call
    returns. No cotangent waits beside that yet: where an operation takes most while it runs, backward has no room to
    record it again."""
    n = len(profile)
    actions: list[Node] = [
        Phase(PhaseKind.FORWARD),
        Keep(0),
        Forward(0, n),
        Restore(0),
        Free(Value(Kind.STATE, 0), Tier.DEVICE),
    ]
    actions += (*map(Record, range(n)), Phase(PhaseKind.BACKWARD), *map(Backward, reversed(range(n))))
    return Reversal(frozenset((0,)), frozenset(), Schedule(Series(tuple(actions)), n, planner="online"))


def _gradients(profile: Profile, start: int, end: int) -> int:
    return sum(cost.gradient_nbytes for cost in profile.stages[start:end])
