"""What backward does, from a planner's schedule: the program's own run is the first sweep, and saves nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.executor.loop.program import Program as Orders
from tapestream.ir import (  # fmt: skip
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Phase,
    PhaseKind,
    Record,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Value,
)

Plan = Callable[[Profile, Budget], Schedule]


@dataclass(frozen=True, slots=True)
class Reversal:
    """Stages kept in the first sweep, and the orders of the backward phase. ``forwards``: stages that these run."""

    kept: frozenset[int]
    orders: Orders
    forwards: int


def of_plan(schedule: Schedule) -> Reversal:
    """A plan for the whole program. Where it records a stage at once, the stage's state is kept, and recorded later."""
    phase, kept, recorded = PhaseKind.FORWARD, set[int](), set[int]()
    out: list[Node] = []
    for action in schedule:
        match action:
            case Phase(kind):
                phase = kind
            case Keep(stage) if phase is PhaseKind.FORWARD:
                kept.add(stage)
            case Record(stage) if phase is PhaseKind.FORWARD:
                recorded.add(stage)
            case Free(value) if phase is PhaseKind.FORWARD:
                kept.discard(value.index if _is_state(value) else -1)
            case Backward(stage) if stage in recorded:
                out += (Restore(stage), Record(stage))
                if stage not in kept:
                    out.append(Free(Value(Kind.STATE, stage), Tier.DEVICE))
                out.append(action)
            case Free(value) if not _is_state(value):
                pass
            case _ if phase is PhaseKind.BACKWARD:
                out.append(action)
            case _:
                pass
    return _reversal(frozenset(kept | recorded), out, schedule.stages)


def of_gaps(profile: Profile, starts: Sequence[int], held: Sequence[int], budget: int, plan: Plan) -> Reversal:
    """Backward from restart checkpoints before the stages ``starts``: gap by gap, each by a plan of its own within what
    those before leave of ``budget``. ``held``: bytes that the first i+1 of them hold. Raises BudgetError."""
    out: list[Node] = []
    ends = [*starts[1:], len(profile)]
    for place in reversed(range(len(starts))):
        start, end = starts[place], ends[place]
        room = budget - (held[place - 1] if place else 0)
        if room <= 0:
            raise BudgetError("Program: the restart checkpoints alone take more than the budget")
        part = Profile(profile.stages[start:end], profile.state_nbytes(start))
        actions = [a for a in plan(part, Budget(room)) if not isinstance(a, Phase) and _concerns_states(a)]
        out += (Restore(start), Free(Value(Kind.STATE, start), Tier.DEVICE), Shift(Series(tuple(actions)), start))
    return _reversal(frozenset(starts), out, len(profile))


def _reversal(kept: frozenset[int], out: list[Node], stages: int) -> Reversal:
    root = Series((Phase(PhaseKind.FORWARD), Phase(PhaseKind.BACKWARD), *out))
    schedule = Schedule(root, stages)
    return Reversal(kept, Orders(schedule), _runs(schedule))


def _runs(schedule: Schedule) -> int:
    return sum(a.stop - a.start if isinstance(a, Forward) else isinstance(a, Record) for a in schedule)


def _concerns_states(action: Action) -> bool:
    return not isinstance(action, Free) or _is_state(action.value)


def _is_state(value: Value) -> bool:
    return value.kind is Kind.STATE
