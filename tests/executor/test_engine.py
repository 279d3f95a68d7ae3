"""The engine obeys any schedule over any segments. Here states are numbers, a tape is the number of its stage."""

from typing import Any

import pytest

from tapestream.costs import Profile
from tapestream.errors import ScheduleError
from tapestream.executor.engine import Engine
from tapestream.ir import (
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Record,
    Schedule,
    Tier,
    Value,
)
from tapestream.ir.lowering import PHASE
from tapestream.planners import planners


class Counting:
    """Segments whose state k is [k]. Notes what runs, and whether anybody else holds the live state."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.runs, self.without_output, self.fails_at = 0, 0, fails_at
        self.last: list[tuple[int, bool]] = []

    def forward(self, live: list[Any], start: int, stop: int) -> list[int]:
        assert live.pop() == [start]
        self.runs += stop - start
        return [stop]

    def record(self, live: list[Any], stage: int, *, output_needed: bool) -> tuple[list[int] | None, int]:
        if stage == self.fails_at:
            self.fails_at = None
            raise MemoryError
        assert live.pop() == [stage]
        self.runs += 1
        self.without_output += not output_needed
        return [stage + 1] if output_needed else None, stage

    def backward(self, tape: int, stage: int, cotangent: int) -> int:
        assert tape == stage == cotangent - 1
        return stage

    def keep(self, state: list[int], stage: int) -> list[int]:
        assert state == [stage]
        return state

    def restore(self, kept: list[int], stage: int, *, last: bool) -> list[int]:
        self.last.append((stage, last))
        return kept


def reversed_by(schedule: Schedule) -> tuple[Engine, Counting]:
    segments = Counting()
    engine, n = Engine(schedule, segments), schedule.stages
    engine.begin([0])
    engine.run_phase(PhaseKind.FORWARD)
    assert engine.hand_over(n) == [n]
    engine.cotangents[n] = n
    engine.run_phase(PhaseKind.BACKWARD)
    assert engine.cotangents == {0: 0}
    assert engine.pending is None
    assert not engine.kept
    assert not engine.tapes
    return engine, segments


@pytest.mark.parametrize(
    ("planner", "knobs"),
    [
        ("store_all", {}),
        ("periodic", {"segments": 7}),
        ("revolve", {"slots": 3}),
        ("rotor", {}),
        ("online", {"slots": 4}),
    ],
)
@pytest.mark.parametrize("n", [10, 300])
def test_plans_are_obeyed(planner: str, knobs: dict[str, int], n: int) -> None:
    schedule = planners[planner](Profile.uniform(n), **knobs)
    _, segments = reversed_by(schedule)
    actions = list(schedule)
    assert segments.runs == sum(a.stop - a.start if isinstance(a, Forward) else isinstance(a, Record) for a in actions)
    if planner in ("revolve", "periodic"):
        taken = sum(last for _, last in segments.last)
        assert taken > 0
        assert segments.without_output > 0


def test_autograd_runs_each_backward_itself() -> None:
    segments = Counting()
    schedule = planners["revolve"](Profile.uniform(12), slots=2)
    engine = Engine(Schedule.of((a for a in schedule if not isinstance(a, Phase)), 12), segments)
    engine.begin([0])
    found = []
    while (stage := engine.bring()) is not None:
        found.append(stage)
        assert engine.index != stage + 1 or engine.live is None
    assert found == list(reversed(range(12)))
    assert engine.bring() is None


def test_after_an_exception_nothing_goes_on() -> None:
    segments = Counting(fails_at=2)
    engine = Engine(Schedule.of(list(map(Record, range(4))), 4), segments)
    engine.begin([0])
    with pytest.raises(MemoryError):
        engine.bring()
    assert engine.bring() is None
    assert segments.runs == 2


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Offload(Value(Kind.STATE, 0), Tier.DEVICE, Tier.DISK), "moves states .* this program has none; give folder="),
        (Free(Value(Kind.PARAMETERS, 0), Tier.DEVICE), "this program streams none"),
        (KeepInside(0), "keeps what stages make inside"),
        (Keep(1), "needs state 1, but state 0 is live"),
    ],
)
def test_what_a_program_does_not_have_is_named(action: Any, text: str) -> None:
    engine = Engine(Schedule.of([Phase(PhaseKind.FORWARD), action, Phase(PhaseKind.BACKWARD)], 2), Counting())
    engine.begin([0])
    with pytest.raises(ScheduleError, match=text):
        engine.run_phase(PhaseKind.FORWARD)


def test_a_phase_ends_before_the_next() -> None:
    forward, backward = Phase(PhaseKind.FORWARD), Phase(PhaseKind.BACKWARD)
    engine = Engine(Schedule.of([forward, Forward(0, 2), backward], 2), Counting())
    engine.begin([0])
    engine.run_phase(PhaseKind.FORWARD)
    assert engine.pending is not None
    assert engine.pending[0] == PHASE
    assert engine.live == [2]
    engine.run_phase(PhaseKind.BACKWARD)
    assert engine.live is None
