"""The first call of a plan is measured: that stages hold more than when they were profiled is said, and planned for."""

from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.storage.meter import track_memory

WIDTH, ROWS, STAGES = 64, 1024, 16
STATE = 4 * WIDTH * ROWS
X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


class Keeping(torch.autograd.Function):
    """Keeps copies on its context, where no hook sees them: ``more`` of them, if asked for, once a call has begun."""

    more = begun = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Keeping.begun |= not ts.recomputing()  # as it is while stages are profiled
        ctx.kept = [x.clone() for _ in range(4 if Keeping.more and Keeping.begun else 1)]
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.cos(ctx.kept[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Keeping.apply(torch.tanh(self.layer(x)))  # type: ignore[no-any-return, no-untyped-call]


def stages(*, more: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    Keeping.more, Keeping.begun = more, False
    return [Block() for _ in range(STAGES)]


def step(run: Any, model: list[nn.Module]) -> list[torch.Tensor]:
    """The gradients, by a loss that holds nothing: what a step holds is the chain's, its result and they."""
    leaves = [p for stage in model for p in stage.parameters()]
    return [*torch.autograd.grad(run(X).sum(), leaves)]


def several_steps(run: Any, model: list[nn.Module]) -> None:
    for _ in range(4):
        step(run, model)


def plain(model: list[nn.Module]) -> list[torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in model:
            x = stage(x)
        return x

    return step(run, model)


def test_more_than_was_profiled_is_said_once_and_planned_for() -> None:
    wanted = plain(stages())
    with pytest.raises(BudgetError) as profiled:
        ts.Chain(stages(), budget=1)(X)
    least = profiled.value.least_nbytes
    assert least is not None
    model = stages(more=True)
    run = ts.Chain(model, budget=least)
    with pytest.warns(ts.BudgetExceeded, match="its stages hold .* more than when they were profiled"):
        assert all(map(torch.equal, step(run, model), wanted))
    assert ts.report(run).exceeded is not None
    with pytest.raises(BudgetError) as refused:
        step(run, model)
    assert refused.value.least_nbytes is not None
    assert refused.value.least_nbytes > least


def test_later_calls_stay_within_the_budget() -> None:
    wanted, budget = plain(stages()), 36 * STATE
    model = stages(more=True)
    run = ts.Chain(model, budget=budget)
    with pytest.warns(ts.BudgetExceeded):
        several_steps(run, model)  # each plan learns from the one before
    for _ in range(2):
        with track_memory() as meter:
            found = step(run, model)
        assert all(map(torch.equal, found, wanted))
        assert meter.peak_nbytes <= 1.02 * budget + STATE + sum(gradient.nbytes for gradient in found)


def test_with_verify_it_is_an_error() -> None:
    model = stages(more=True)
    with pytest.raises(BudgetError, match="its stages hold"):
        step(ts.Chain(model, budget=12 * STATE, verify=True), model)


def test_inside_a_measurement_of_the_users_nothing_is_measured() -> None:
    run = ts.Chain(stages(more=True), budget=12 * STATE)
    x = torch.ones(ROWS, WIDTH)
    found = run(x)  # is profiled
    with track_memory():
        found.sum().backward()
    assert ts.report(run).exceeded is None
