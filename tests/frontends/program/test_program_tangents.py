"""Forward-mode differentiation inside a program: no replay has its tangents, so what runs then is kept; all else runs
again within the budget."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import least
from torch import nn
from torch.autograd import forward_ad

import tapestream as ts
from tapestream.errors import GradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use of it
WIDTH, BLOCKS = 32, 16


class Owner:
    """Something that can be referred to weakly."""


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * 2


def tangent_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + tangent


def by_a_function(x: torch.Tensor) -> torch.Tensor:
    return tangent_of(lambda x: Doubling.apply(torch.tanh(x)), x)  # type: ignore[no-any-return]


def beside(x: torch.Tensor) -> torch.Tensor:
    """What has no tangent is used and made inside, too."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        other = torch.sin(x)
        found = forward_ad.unpack_dual(dual * other).tangent
    return found + other


def gradient_inside(x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y = x.detach().requires_grad_()
        dual = forward_ad.make_dual(y, torch.ones_like(y))
        (slope,) = torch.autograd.grad(forward_ad.unpack_dual(torch.tanh(dual)).tangent.sum(), y)
    return torch.tanh(x) + slope


INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tangent": lambda x: tangent_of(torch.tanh, x),
    "a Function": by_a_function,
    "no tangent": beside,
    "transform": lambda x: tangent_of(lambda x: torch.func.vjp(torch.tanh, x)[0] * x, x),
    "gradient": gradient_inside,
    "nothing saved": lambda x: tangent_of(torch.neg, x),
}


class Net(nn.Module):
    """Plain layers, and ``inside`` between every four of them."""

    def __init__(self, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k % 4 == 1:
                x = self.inside(x)
        return x


def given(rows: int = 8) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH).requires_grad_()


def least_of(net: Net) -> int:
    return least(net, [*net.parameters()], lambda: (given(),), 0)


def gradients(net: Net, function: Callable[[torch.Tensor], torch.Tensor], rows: int = 8) -> list[torch.Tensor]:
    x = given(rows)
    found = function(x)
    return [found.detach().clone(), *torch.autograd.grad(found.square().sum(), [x, *net.parameters()])]


@pytest.mark.filterwarnings("ignore::tapestream.errors.BudgetExceeded")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("planner", ["auto", "revolve"])
@pytest.mark.parametrize("times", [1, 3, 1000])
@pytest.mark.parametrize("name", INSIDE)
def test_gradients_are_those_of_plain_pytorch(name: str, times: int, planner: str) -> None:
    net = Net(INSIDE[name])
    wanted = gradients(net, net)
    run = ts.Program(net, budget=times * least_of(net), planner=planner)
    for _ in range(4):
        assert all(map(torch.equal, gradients(net, run), wanted))
    assert run.report is not None
    assert times > 1 or (run.report.planned and run.report.reruns > 0)  # what lies between runs again


def test_what_is_kept_is_said_where_it_does_not_fit() -> None:
    net = Net(INSIDE["tangent"])
    with pytest.warns(ts.BudgetExceeded, match="where forward-mode differentiation computes tangents"):
        gradients(net, ts.Program(net, budget="2400KiB"), rows=2048)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ts.BudgetExceeded)
        gradients(net, ts.Program(net, budget="16MiB"), rows=2048)


def test_a_write_inside_into_what_was_made_before_is_refused() -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        with forward_ad.dual_level():
            y.mul_(2)
        return torch.tanh(y)

    net = Net(writes)
    wanted = gradients(net, net)
    assert all(map(torch.equal, gradients(net, ts.Program(net, budget="16MiB", planner="store_all")), wanted))
    with pytest.raises(GradientError, match="written into inside the program"):
        gradients(net, ts.Program(net, budget=least_of(Net(torch.tanh)) * 2))


def test_nothing_lives_longer_than_the_result() -> None:
    net = Net(INSIDE["tangent"])
    run, x = ts.Program(net, budget="16MiB"), given()
    gc.collect()
    gc.disable()
    try:
        found = run(x)
        held = Owner()
        assert found.grad_fn is not None
        found.grad_fn.metadata["held"] = held
        gone = weakref.ref(held)
        del found, held
        assert gone() is None
    finally:
        gc.enable()
