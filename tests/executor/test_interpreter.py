"""The interpreter obeys any valid schedule, refuses what the judge would refuse, and skips what autograd does not
ask for."""

import pytest
import torch
from torch import nn

from tapestream.costs import Profile
from tapestream.errors import GradientError, ScheduleError
from tapestream.executor.interpreter import Interpreter
from tapestream.ir.actions import (
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Phase,
    PhaseKind,
    Record,
    Restore,
    Tier,
    Update,
    Value,
)
from tapestream.ir.schedule import Schedule
from tapestream.planners import planners
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import take_apart

N = 6
CPU = torch.device("cpu")


def runner_of(modules: list[nn.Module]) -> Runner:
    stages = [Stage(k, module) for k, module in enumerate(modules)]
    traits = [
        Traits(buffers=s.buffer_slots(), leaves=tuple(s.parameters()), requires=None, calls_autograd=False)
        for s in stages
    ]
    return Runner(stages, traits, CPU)


def modules_of() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(N)]


def differentiate(schedule: Schedule) -> tuple[list[torch.Tensor | None], int]:
    """Gradients of the input and of every parameter by the interpreter, and how many runs that took."""
    modules = modules_of()
    interpreter = Interpreter(schedule, runner_of(modules))
    x = torch.ones(3, 4, requires_grad=True)
    torch.manual_seed(1)
    interpreter.begin(take_apart(x)[0])
    interpreter.run_phase(PhaseKind.FORWARD)
    assert interpreter.live is not None
    interpreter.cotangents[N] = [2 * interpreter.live.tensors[0]]
    interpreter.run_phase(PhaseKind.BACKWARD)
    assert not interpreter.travel.kept
    assert not interpreter.travel.tapes
    parameters = nn.ModuleList(modules).parameters()
    return [*interpreter.cotangents[0], *(interpreter.sums[id(p)][1] for p in parameters)], interpreter.runner.runs


@pytest.mark.parametrize(
    ("planner", "knobs"),
    [
        ("store_all", {}),
        ("periodic", {"segments": 3}),
        ("bisection", {}),
        ("revolve", {"slots": 1}),
        ("revolve", {"slots": 2}),
    ],
)
def test_every_schedule_gives_the_gradient_of_plain_pytorch(planner: str, knobs: dict[str, int]) -> None:
    schedule = planners[planner](Profile.uniform(N), **knobs)
    modules = modules_of()
    x = torch.ones(3, 4, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(nn.Sequential(*modules)(x).square().sum(), [x, *nn.ModuleList(modules).parameters()])
    found, runs = differentiate(schedule)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert runs == sum(
        action.stop - action.start if isinstance(action, Forward) else isinstance(action, Record) for action in schedule
    )


def begun(actions: list[object]) -> Interpreter:
    schedule = Schedule.of([Phase(PhaseKind.FORWARD), *actions], N)
    interpreter = Interpreter(schedule, runner_of(modules_of()))
    interpreter.begin(take_apart(torch.ones(3, 4, requires_grad=True))[0])
    return interpreter


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([Forward(1, 2)], "needs state 1, but state 0 is live"),
        ([Record(0), Keep(0)], "needs state 0, but state 1 is live"),
        ([Update(0)], "this program streams none"),
        ([Free(Value(Kind.STATE, 0), Tier.DISK)], "this program has none"),
    ],
)
def test_what_the_judge_would_refuse_is_refused(actions: list[object], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        begun(actions).run_phase(PhaseKind.FORWARD)


def test_a_kept_state_that_was_changed_is_refused() -> None:
    interpreter = begun([Keep(0), Forward(0, 2), Restore(0), Record(0)])
    interpreter._entered = PhaseKind.FORWARD
    interpreter._next()
    interpreter._step()
    interpreter.travel.kept[0].state.tensors[0].add_(1)
    with pytest.raises(GradientError, match=r"stage 0 .*modified by an in-place operation after it was kept"):
        interpreter.run_phase(PhaseKind.FORWARD)


def test_stages_that_autograd_does_not_ask_for_are_skipped() -> None:
    back = [Backward(k) for k in range(N - 1, -1, -1)]
    interpreter = begun([*(Record(k) for k in range(N)), Phase(PhaseKind.BACKWARD), *back])
    for k in range(N):
        interpreter.run_stage(k)
    state = interpreter.live
    assert state is not None
    (cotangent,) = interpreter.run_backward(2, [torch.ones(3, 4)])
    assert cotangent is not None
    assert set(interpreter.travel.tapes) == {0, 1}
    with pytest.raises(GradientError, match=r"stage 2 .*a second time"):
        interpreter.run_backward(2, [torch.ones(3, 4)])
