"""Chains whose plans never part some stages: what such stages may do all the same, bit for bit, or are refused for."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.frontends import chain_call
from tapestream.planning import profile
from tapestream.runner.runner import Runner

Stages = Sequence[Callable[[Any], Any]]


@pytest.fixture(autouse=True)
def short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a recompute is left out however short it is."""
    monkeypatch.setattr(profile, "_LONG_SECONDS", 0.0)


def in_turn(stages: Stages) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    return run


def gradients(run: Callable[[Any], Any], stages: Stages, x: torch.Tensor) -> list[torch.Tensor | None]:
    leaves = [x, *nn.ModuleList(s for s in stages if isinstance(s, nn.Module)).parameters()]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(3)
    run(x).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def segments(stages: Stages, number: int = 2, **options: Any) -> ts.Chain:
    return ts.Chain(stages, planner="periodic", segments=number, **options)


def dense(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def test_a_stage_may_read_numbers_before_one_that_saves_nothing() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.linear(x))
            mean = h.detach().abs().mean()
            return h + h if mean.numpy() > 0 else h

    torch.manual_seed(0)
    stages = [Reading(), lambda x: x.flip(0), Reading(), lambda x: x.flip(0)]
    x = torch.randn(8, 16, requires_grad=True)
    net = segments(stages)
    for _ in range(2):
        assert same(gradients(net, stages, x), gradients(in_turn(stages), stages, x))


def test_a_captured_parameter_that_was_not_used_before_is_refused() -> None:
    extra, on = nn.Parameter(torch.ones(16)), list[int]()

    def gated(x: torch.Tensor) -> torch.Tensor:
        return x * extra if on else x * 2

    def own_leaf(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones((), requires_grad=True)

    stages = [own_leaf, gated, dense(), dense()]
    x = torch.randn(4, 16, requires_grad=True)
    net = segments(stages)
    gradients(net, stages, x)
    on.append(1)
    with pytest.raises(InputError, match=r"stage 1 \(gated\) used a tensor"):
        gradients(net, stages, x)


@pytest.mark.parametrize("at", [1, 3])
def test_a_late_write_into_what_the_stage_before_has_saved_is_refused(at: int) -> None:
    on = list[int]()

    def writing(x: torch.Tensor) -> torch.Tensor:
        return (x.mul_(0.5) if on else x) * 3

    torch.manual_seed(0)
    stages: list[Any] = [nn.Sequential(nn.Linear(16, 16), nn.Sigmoid()) for _ in range(4)]
    stages[at] = writing
    x = torch.randn(4, 16, requires_grad=True)
    net = segments(stages)
    gradients(net, stages, x)
    on.append(1)
    with pytest.raises(GradientError, match=rf"stage {at} .*changed its input in place"):
        gradients(net, stages, x)


def test_what_a_stage_has_saved_may_not_be_written_into_either() -> None:
    """Where the end of a recompute is left out, what is saved goes through hooks, which autograd does not check."""
    on = list[int]()

    def writing(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x)
        return torch.sigmoid(y.mul_(0.5) if on else y * 2).flip(0)

    stages = [dense(), writing, dense()]
    x = torch.randn(4, 16, requires_grad=True)
    net = segments(stages, 3)
    gradients(net, stages, x)
    on.append(1)
    with pytest.raises((GradientError, RuntimeError), match=r"in-?place"):
        gradients(net, stages, x)


@pytest.mark.parametrize("planner", [{"planner": "store_all"}, {"planner": "periodic", "segments": 2}])
def test_a_stage_may_ask_for_the_gradient_of_what_it_is_given(planner: dict[str, Any]) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x if x.requires_grad else x.requires_grad_()))

    torch.manual_seed(0)
    stages = [dense().requires_grad_(False), Asking(), dense(), dense()]
    x = torch.randn(4, 16)
    assert same(gradients(ts.Chain(stages, **planner), stages, x), gradients(in_turn(stages), stages, x))


def test_no_graph_is_too_deep() -> None:
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x * 1.0001
        return x

    stages = [many] * 2100
    x = torch.randn(4, requires_grad=True)
    found: list[Any] = []

    def run() -> None:  # of a thread whose stack cannot grow
        net = segments(stages, 1)
        out = net(x)
        out.backward(torch.ones(4))
        found.append(x.grad)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    wanted = x.detach().requires_grad_()
    in_turn(stages)(wanted).backward(torch.ones(4))
    assert torch.equal(found[0], wanted.grad)


def test_the_cotangent_of_a_segment_goes_when_its_last_stage_has_used_it() -> None:
    class Heavy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            transient = torch.ones(2**20)  # 4 MiB
            return gradients[0] * weight + 0 * transient[:1], (gradients[0] * x).sum(0)

    class Costly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Heavy.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return out

    def grow(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * 64, 0)  # 2 MiB

    stages = [Costly(), grow, lambda x: x[:128], nn.Linear(64, 64)]
    x = torch.randn(128, 64, requires_grad=True)
    net = ts.Chain(stages, planner="periodic", segments=2)
    gradients(net, stages, x)
    assert net.plan is not None
    with ts.track_memory() as meter:
        net(x).sum().backward()
    beside = sum(p.nbytes for s in stages if isinstance(s, nn.Module) for p in s.parameters())
    assert meter.peak_nbytes <= 1.05 * net.plan.peak_nbytes + beside + x.nbytes


def test_an_end_that_cannot_be_left_out_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x)).flip(0)
            if torch.isnan(y).any():
                raise RuntimeError("NaN")
            return y

    runners: list[Runner] = []

    class Counted(Runner):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            runners.append(self)

    monkeypatch.setattr(chain_call, "Runner", Counted)
    torch.manual_seed(0)
    stages = [Checking() for _ in range(6)]
    x = torch.randn(4, 16, requires_grad=True)
    net = segments(stages)
    for _ in range(3):
        assert same(gradients(net, stages, x), gradients(in_turn(stages), stages, x))
    assert net.plan is not None
    assert runners[0].runs > net.plan.simulation.forwards
    assert [runner.runs for runner in runners[1:]] == [net.plan.simulation.forwards] * 2


def test_two_live_calls_of_other_shapes_with_batch_norm() -> None:
    """The profile of the second puts back what it has written into buffers that the first one's tape holds."""

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(4)]

    found = []
    for number in (None, 1, 2):
        stages = make()
        run = in_turn(stages) if number is None else segments(stages, number)
        first, second = run(torch.ones(4, 16).cumsum(0)), run(torch.ones(9, 16).cumsum(0))
        first.square().sum().backward()
        second.square().sum().backward()
        net = nn.ModuleList(stages)
        found.append([*(p.grad for p in net.parameters()), *net.buffers()])
    assert same(found[1], found[0])
    assert same(found[2], found[0])
