"""The last stages recorded as one graph: which they are, and that nothing but the time differs."""

import pytest
import torch
from torch import nn

from tapestream.costs import Profile
from tapestream.errors import GradientError, InputError, ScheduleError
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.tail import tail_of
from tapestream.ir.actions import Backward, Forward, Keep, Phase, PhaseKind, Record, Restore
from tapestream.ir.schedule import Schedule, run_once
from tapestream.planners import planners
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import take_apart

N = 5
CPU = torch.device("cpu")


def stored() -> Schedule:
    return planners["store_all"](Profile.uniform(N))


def tail(schedule: Schedule, mutating: int | None = None, n: int = N) -> int:
    traits = [Traits(mutates=frozenset({0}) if k == mutating else frozenset()) for k in range(n)]
    return tail_of(schedule, run_once(schedule), traits)


def test_all_stages_of_a_plan_that_stores_everything() -> None:
    assert tail(stored()) == 0


@pytest.mark.parametrize("k", range(N))
def test_a_stage_that_writes_into_its_input_begins_a_graph(k: int) -> None:
    assert tail(stored(), mutating=k) == k


def test_stages_that_run_twice_are_left_out() -> None:
    back = [Phase(PhaseKind.BACKWARD), Backward(3), Backward(2), Restore(0), Record(0), Record(1), Backward(1)]
    schedule = Schedule.of(
        [Phase(PhaseKind.FORWARD), Keep(0), Forward(0, 2), Record(2), Record(3), *back, Backward(0)], 4
    )
    assert tail(schedule, n=4) == 2


def test_nothing_may_happen_between_two_records_or_backwards() -> None:
    forward = [Phase(PhaseKind.FORWARD), Record(0), Keep(1), Record(1), Record(2)]
    schedule = Schedule.of([*forward, Phase(PhaseKind.BACKWARD), Backward(2), Backward(1), Backward(0)], 3)
    assert tail(schedule, n=3) == 1
    forward = [Phase(PhaseKind.FORWARD), Record(0), Record(1), Record(2)]
    schedule = Schedule.of([*forward, Phase(PhaseKind.BACKWARD), Backward(2), Restore(0), Backward(1), Backward(0)], 3)
    assert tail(schedule, n=3) == 2


def modules_of() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(N)]


def interpreter_of(stages: list[Stage], first: int | None) -> Interpreter:
    traits = [Traits(leaves=tuple(s.parameters())) for s in stages]
    schedule = stored()
    return Interpreter(schedule, Runner(stages, traits, CPU, once=run_once(schedule)), tail=first)


def differentiate(first: int | None) -> tuple[list[torch.Tensor], int]:
    modules = modules_of()
    interpreter = interpreter_of([Stage(k, m) for k, m in enumerate(modules)], first)
    torch.manual_seed(1)
    interpreter.begin(take_apart(torch.ones(3, 4, requires_grad=True))[0])
    interpreter.run_phase(PhaseKind.FORWARD)
    assert len(interpreter.travel.tapes) == (N if first is None else first + 1)
    assert interpreter.live is not None
    interpreter.cotangents[N] = [2 * interpreter.live.tensors[0]]
    interpreter.run_phase(PhaseKind.BACKWARD)
    assert not interpreter.travel.tapes
    assert not interpreter.runner.seen
    (given,) = interpreter.cotangents[0]
    assert given is not None
    found = [given, *(interpreter.sums[id(p)][1] for p in nn.ModuleList(modules).parameters())]
    return found, interpreter.runner.runs


@pytest.mark.parametrize("first", range(N))
def test_the_same_bits_wherever_the_tail_begins(first: int) -> None:
    expected, runs = differentiate(None)
    found, same_runs = differentiate(first)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert runs == same_runs == N


def test_errors_name_the_stage_inside_the_tail() -> None:
    held: dict[str, torch.Tensor] = {}
    stranger = torch.ones(4, requires_grad=True)

    def capturing(x: torch.Tensor) -> torch.Tensor:
        return x * held.get("captured", 2)

    def keeping(x: torch.Tensor) -> torch.Tensor:
        held["inside"] = torch.tanh(x)
        return held["inside"] * 2

    functions = [torch.tanh, torch.sin, keeping, capturing, torch.exp]
    stages = [Stage(k, function) for k, function in enumerate(functions)]

    def record(x: torch.Tensor) -> None:
        interpreter = interpreter_of(stages, 0)
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
    interpreter = interpreter_of([Stage(k, function) for k, function in enumerate(functions)], 0)
    interpreter.begin(take_apart(x)[0])
    with pytest.raises(GradientError, match=r"stage 2 .*changed its input in place"):
        interpreter.run_phase(PhaseKind.FORWARD)


def test_a_stage_of_the_tail_runs_once() -> None:
    interpreter = interpreter_of([Stage(k, m) for k, m in enumerate(modules_of())], 0)
    state = take_apart(torch.ones(3, 4))[0]
    interpreter.runner.record_tail(0, [state])
    with pytest.raises(ScheduleError, match=r"stage 0 .*was to run once"):
        interpreter.runner.record_tail(0, [state])
