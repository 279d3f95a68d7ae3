"""Stages that a schedule never parts are run as one: which they are, and that nothing but the time differs."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tapestream.costs import Budget, Profile, StageCost
from tapestream.errors import BudgetError, GradientError, InputError, ScheduleError
from tapestream.executor.fused import Shorter, fused
from tapestream.executor.interpreter import Interpreter
from tapestream.ir.actions import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Tier,
    Value,
    Wait,
)
from tapestream.ir.schedule import Schedule, run_once
from tapestream.planners import planners
from tapestream.runner.fused import Fused
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import take_apart
from tapestream.simulate import simulate

N = 5
CPU = torch.device("cpu")
TURN = Phase(PhaseKind.BACKWARD)
START = Phase(PhaseKind.FORWARD)


def stored(n: int = N) -> Schedule:
    return planners["store_all"](Profile.uniform(n))


def numbers(run: Shorter) -> list[list[int]]:
    return [[part.index for part in stage.parts] for stage in run.stages]


def shorter(schedule: Schedule, traits: Sequence[Traits] | None = None) -> Shorter:
    n = schedule.stages
    return fused(schedule, [Stage(k, torch.tanh) for k in range(n)], traits or [Traits()] * n, frozenset())


def test_all_stages_of_a_plan_that_stores_everything() -> None:
    run = shorter(stored())
    assert numbers(run) == [[*range(N)]]
    assert list(run.schedule) == [START, Record(0), TURN, Backward(0)]
    assert run.stages[0].name == "stages 0 to 4"


@pytest.mark.parametrize("k", range(1, N))
def test_a_stage_that_writes_into_its_input_begins_one(k: int) -> None:
    traits = [Traits(mutates=frozenset({0}) if j == k else frozenset()) for j in range(N)]
    assert numbers(shorter(stored(), traits)) == [[*range(k)], [*range(k, N)]]


def test_a_stage_that_differentiates_inside_is_alone() -> None:
    traits = [Traits(calls_autograd=k == 2) for k in range(N)]
    assert numbers(shorter(stored(), traits)) == [[0, 1], [2], [3, 4]]


def test_segments_are_run_as_one_each_time() -> None:
    forward = [START, Keep(0), Forward(0, 2), Keep(2), Forward(2, 4), Record(4), Record(5)]
    back = [Backward(5), Backward(4), Restore(2), Free(Value(Kind.STATE, 2), Tier.DEVICE), Record(2), Record(3)]
    last = [Backward(3), Backward(2), Restore(0), Record(0), Record(1), Backward(1), Backward(0)]
    run = shorter(Schedule.of([*forward, TURN, *back, *last], 6))
    assert numbers(run) == [[0, 1], [2, 3], [4, 5]]
    assert list(run.schedule) == [
        START, Keep(0), Forward(0, 1), Keep(1), Forward(1, 2), Record(2), TURN, Backward(2), Restore(1),
        Free(Value(Kind.STATE, 1), Tier.DEVICE), Record(1), Backward(1), Restore(0), Record(0), Backward(0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "between",
    [
        [Keep(1)], [Offload(Value(Kind.STATE, 1), Tier.DEVICE, Tier.DISK)], [Wait(Value(Kind.STATE, 1), Tier.DISK)],
        [Prefetch(Value(Kind.STATE, 1), Tier.DISK, Tier.DEVICE)], [Free(Value(Kind.STATE, 1), Tier.DEVICE)],
        [Restore(1)],
    ],
)  # fmt: skip
def test_what_happens_between_two_stages_parts_them(between: list[Action]) -> None:
    schedule = Schedule.of([START, Record(0), *between, Record(1), TURN, Backward(1), Backward(0)], 2)
    assert numbers(shorter(schedule)) == [[0], [1]]
    schedule = Schedule.of([START, Record(0), Record(1), TURN, Backward(1), *between, Backward(0)], 2)
    assert numbers(shorter(schedule)) == [[0], [1]]
    elsewhere = Schedule.of([START, Record(0), Record(1), TURN, *between, Backward(1), Backward(0)], 2)
    assert numbers(shorter(elsewhere)) == [[0], [1]]


def test_a_stage_whose_saved_tensors_move_is_alone() -> None:
    saved = Value(Kind.SAVED, 1)
    moves = [Offload(saved, Tier.DEVICE, Tier.DISK), Wait(saved, Tier.DISK), Free(saved, Tier.DEVICE)]
    comes = [Prefetch(saved, Tier.DISK, Tier.DEVICE), Wait(saved, Tier.DEVICE)]
    actions = [START, *map(Record, range(5)), *moves, TURN, Backward(4), Backward(3), *comes]
    run = shorter(Schedule.of([*actions, Backward(2), Backward(1), Backward(0)], 5))
    assert numbers(run) == [[0], [1], [2], [3, 4]]
    assert [a.value.index for a in run.schedule if isinstance(a, (Offload, Prefetch, Wait, Free))] == [1] * 5


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    size = st.integers(1, 9)
    n = draw(st.integers(2, 9))
    stages = [StageCost(1.0, 2.0, draw(size), draw(size)) for _ in range(n)]
    return Profile(tuple(stages), 0)


@given(profiles(), st.floats(0.1, 1.0), st.sampled_from(["rotor", "revolve", "periodic", "least_peak", "store_all"]))
def test_every_stage_is_run_as_often_and_in_the_same_order(profile: Profile, share: float, planner: str) -> None:
    try:
        most = simulate(planners["store_all"](profile), profile).peak_nbytes[Tier.DEVICE]
        schedule = planners[planner](profile, Budget(max(1, int(share * most))), None)
    except BudgetError:
        return
    run = shorter(schedule)
    assert [k for group in numbers(run) for k in group] == [*range(len(profile))]

    def spelled(schedule: Schedule, groups: list[list[int]]) -> list[Any]:
        found: list[Any] = []
        for action in schedule:
            match action:
                case Forward(start, stop):
                    found += [("F", j) for k in range(start, stop) for j in groups[k]]
                case Record(k):
                    found += [("R", j) for j in groups[k]]
                case Backward(k):
                    found += [("B", j) for j in reversed(groups[k])]
                case Keep(k) | Restore(k):
                    found.append((type(action).__name__, groups[k][0] if k < len(groups) else len(profile)))
                case Free(value, _):
                    found.append(("Free", groups[value.index][0] if value.index < len(groups) else len(profile)))
                case _:
                    found.append(action)
        return found

    assert spelled(run.schedule, numbers(run)) == spelled(schedule, [[k] for k in range(len(profile))])


# -- the same bits --------------------------------------------------------------------------------------------------


def modules_of() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(N)]


def run_of(schedule: Schedule, modules: Sequence[Any], *, as_one: bool) -> Interpreter:
    stages = [Stage(k, m) for k, m in enumerate(modules)]
    traits = [Traits(leaves=tuple(s.parameters()), buffers=s.buffer_slots()) for s in stages]
    run = fused(schedule, stages, traits, frozenset()) if as_one else Shorter(schedule, stages, traits)
    return Interpreter(run.schedule, Runner(run.stages, run.traits, CPU, once=run_once(run.schedule)))


def differentiate(schedule: Schedule, *, as_one: bool) -> tuple[list[torch.Tensor], int, int]:
    modules = modules_of()
    interpreter = run_of(schedule, modules, as_one=as_one)
    last = len(interpreter.runner.stages)
    torch.manual_seed(1)
    interpreter.begin(take_apart(torch.ones(3, 4, requires_grad=True))[0])
    interpreter.run_phase(PhaseKind.FORWARD)
    assert interpreter.live is not None
    interpreter.cotangents[last] = [2 * interpreter.live.tensors[0]]
    interpreter.run_phase(PhaseKind.BACKWARD)
    assert not interpreter.travel.tapes
    assert not interpreter.runner.seen
    (given,) = interpreter.cotangents[0]
    assert given is not None
    net = nn.ModuleList(modules)
    found = [given, *(interpreter.sums[id(p)][1] for p in net.parameters()), *net.buffers(), torch.get_rng_state()]
    return found, interpreter.runner.runs, last


@pytest.mark.parametrize(
    "schedule",
    [
        stored(),
        planners["periodic"](Profile.uniform(N), None, None, segments=2),
        planners["periodic"](Profile.uniform(N), None, None, segments=3),
        planners["revolve"](Profile.uniform(N), None, None, slots=2),
    ],
    ids=["stored", "two segments", "three segments", "revolve"],
)
def test_the_same_bits_and_as_many_runs(schedule: Schedule) -> None:
    expected, runs, _ = differentiate(schedule, as_one=False)
    found, same_runs, stages = differentiate(schedule, as_one=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert runs == same_runs
    assert stages < N or schedule.planner == "revolve"


# -- errors ---------------------------------------------------------------------------------------------------------


def test_errors_name_the_stage_inside() -> None:
    held: dict[str, torch.Tensor] = {}
    stranger = torch.ones(4, requires_grad=True)

    def capturing(x: torch.Tensor) -> torch.Tensor:
        return x * held.get("captured", 2)

    def keeping(x: torch.Tensor) -> torch.Tensor:
        held["inside"] = torch.tanh(x)
        return held["inside"] * 2

    def record(x: torch.Tensor) -> None:
        interpreter = run_of(stored(), [torch.tanh, torch.sin, keeping, capturing, torch.exp], as_one=True)
        interpreter.begin(take_apart(x)[0])
        interpreter.run_phase(PhaseKind.FORWARD)

    x = torch.ones(3, 4, requires_grad=True)
    held["captured"] = stranger
    with pytest.raises(InputError, match=r"stage 3 \(capturing\) used a tensor of shape \(4,\)"):
        record(x)
    held["captured"] = stranger * 2
    with pytest.raises(GradientError, match=r"stage 3 \(capturing\) uses a tensor that was computed before"):
        record(x)
    del held["captured"]
    record(x)
    with pytest.raises(GradientError, match=r"inside of stage 2 \(keeping\)"):
        held["inside"].sum().backward()


def test_a_late_write_into_the_callers_tensor_is_refused() -> None:
    x = torch.ones(3, 4)
    functions = [lambda t: t, torch.nn.Identity(), lambda t: t.add_(1), torch.exp, torch.exp]
    interpreter = run_of(stored(), functions, as_one=True)
    interpreter.begin(take_apart(x)[0])
    with pytest.raises(GradientError, match=r"stage 2 .*changed its input in place"):
        interpreter.run_phase(PhaseKind.FORWARD)


def test_stages_that_are_run_once_are() -> None:
    interpreter = run_of(stored(), modules_of(), as_one=True)
    interpreter.runner.record(0, [take_apart(torch.ones(3, 4))[0]])
    with pytest.raises(ScheduleError, match=r"stages 0 to 4 .*run once"):
        interpreter.runner.record(0, [take_apart(torch.ones(3, 4))[0]])


def test_what_a_function_inside_has_captured_is_looked_at() -> None:
    scale = torch.full((4,), 2.0)
    functions = [torch.tanh, lambda x: x * scale, torch.sin, torch.exp, torch.tanh]
    schedule = Schedule.of(
        [START, Keep(0), Forward(0, 4), Record(4), TURN, Backward(4), Restore(0), *map(Record, range(4)),
         *map(Backward, range(3, -1, -1))], N,
    )  # fmt: skip
    interpreter = run_of(schedule, functions, as_one=True)
    interpreter.begin(take_apart(torch.ones(3, 4, requires_grad=True))[0])
    interpreter.run_phase(PhaseKind.FORWARD)
    scale.mul_(2)
    interpreter.cotangents[2] = [torch.ones(3, 4)]
    with pytest.raises(GradientError, match=r"stages 0 to 3.*captured"):
        interpreter.run_phase(PhaseKind.BACKWARD)


def test_what_is_learned_of_stages_run_as_one_is_known_of_each() -> None:
    parts = [Stage(k, nn.BatchNorm1d(4)) for k in range(2)]
    one = Fused(0, parts)
    one.stills.draws_host = True
    assert all(part.stills.draws_host for part in parts)
    one.stills.expect([(parts[1].modules[0], "running_mean")])
    assert all(part.stills.late for part in parts)
    assert set(one.stills.late) == {*parts[0].stills.late, *parts[1].stills.late}
    assert Fused(0, parts).stills.late == one.stills.late
    assert Fused(0, parts).stills.draws_host


def test_numbers_drawn_by_surprise_are_refused_with_the_stages_named() -> None:
    odd: list[int] = []

    def drawing(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() if odd else x

    functions = [torch.tanh, drawing, torch.sin, torch.exp, torch.tanh]
    schedule = Schedule.of(
        [START, Keep(0), Forward(0, 4), Record(4), TURN, Backward(4), Restore(0), *map(Record, range(4)),
         *map(Backward, range(3, -1, -1))], N,
    )  # fmt: skip
    stages = [Stage(k, f) for k, f in enumerate(functions)]
    run = fused(schedule, stages, [Traits(draws_host=False)] * N, frozenset())
    odd.append(1)
    interpreter = Interpreter(run.schedule, Runner(run.stages, run.traits, CPU))
    interpreter.begin(take_apart(torch.ones(3, 4, requires_grad=True))[0])
    with pytest.raises(GradientError, match="stages 0 to 3 drew from Python's"):
        interpreter.run_phase(PhaseKind.FORWARD)
    assert all(stage.stills.draws_host for stage in stages)


def test_a_state_inside_lives_no_longer_than_its_stage() -> None:
    """Nobody holds the state before the first of them, nor those between, while a later one runs. (The state before
    stage 0 is the caller's own.)"""
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        made.append(StorageWeakRef(x.untyped_storage()))  # type: ignore[no-untyped-call]
        alive.append(sum(not one.expired() for one in made))  # type: ignore[no-untyped-call]
        return x.clone()

    traits = [Traits(plain_forward=True, draws_host=False)] * 4
    actions = [START, Record(0), Keep(1), *map(Record, range(1, 4)), TURN, *map(Backward, range(3, -1, -1))]
    run = fused(Schedule.of(actions, 4), [Stage(k, noted) for k in range(4)], traits, frozenset())
    assert numbers(run) == [[0], [1, 2, 3]]
    for requires in (False, True):
        made.clear()
        alive.clear()
        states = [replace(take_apart(torch.ones(8))[0], requires=(requires,))]
        runner = Runner(run.stages, run.traits, CPU, once=frozenset())
        runner.forward(1, states)
        assert not states
        assert alive == [1, 1, 1]
