"""`verify=True`: what a program makes again has the bits of its first run, and its budget holds; else an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import least
from torch import nn
from torch.autograd import forward_ad

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError

BLOCKS, WIDTH = 12, 16
CALLS = {"count": 0}


class Unsteady(torch.autograd.Function):
    """Another result in each run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS["count"] += 1
        return x * (1 + 1e-3 * CALLS["count"])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def tangent(x: torch.Tensor) -> torch.Tensor:
    """What is saved there is kept."""
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(torch.tanh(forward_ad.make_dual(x, torch.ones_like(x))))
        return value + slope


def net(inside: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = inside(torch.tanh(layer(x)))
        return x

    return forward, layers


def given(rows: int = 8) -> torch.Tensor:
    return torch.ones(rows, WIDTH).requires_grad_()


STEADY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": torch.sin,
    "dropout": lambda x: torch.dropout(x, 0.3, True),
    "in place": lambda x: (x * 2).mul_(0.5).sin_(),
    "nan": lambda x: x + torch.log(-x).detach(),
    "complex": lambda x: torch.fft.ifft(torch.fft.fft(x)).real,
    "integers": lambda x: x * torch.argsort(x, 1).to(x.dtype),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("planner", ["auto", "revolve"])
@pytest.mark.parametrize("name", STEADY)
def test_what_is_the_same_again_passes(name: str, planner: str) -> None:
    forward, layers = net(STEADY[name])
    leaves = [*layers.parameters()]
    budget = 2 * least(forward, leaves, lambda: (given(),), 0)
    wanted: list[torch.Tensor] = []
    for run in (forward, ts.Program(forward, budget=budget, planner=planner, verify=True)):
        for _ in range(3):
            torch.manual_seed(1)
            found = torch.autograd.grad(run(given()).sum(), leaves)
            wanted = wanted or list(found)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True))
    assert isinstance(run, ts.Program)
    assert run.report is not None
    assert run.report.reruns > 0


def test_what_is_another_again_is_found_by_name() -> None:
    forward, layers = net(Unsteady.apply)  # type: ignore[arg-type]
    plain, _ = net(torch.sin)
    budget = 2 * least(plain, [*layers.parameters()], lambda: (given(),), 0)
    run = ts.Program(forward, budget=budget, planner="revolve", verify=True)
    with pytest.raises(GradientError, match=r"\(Unsteady\) gave other numbers in a replay"):
        run(given()).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own use of it
def test_what_exceeds_the_budget_is_an_error() -> None:
    forward, _ = net(tangent)
    with pytest.warns(ts.BudgetExceeded):
        ts.Program(forward, budget="1700KiB")(given(2000))
    with pytest.raises(BudgetError, match="where forward-mode differentiation computes tangents"):
        ts.Program(forward, budget="1700KiB", verify=True)(given(2000))


def test_it_is_true_or_false() -> None:
    with pytest.raises(InputError, match="verify='yes' was given"):
        ts.Program(torch.sin, verify="yes")  # type: ignore[arg-type]
