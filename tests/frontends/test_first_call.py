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


class Keeping(torch.autograd.Function):
    """Keeps copies on its context, where no hook sees them: few as long as it is new, more afterwards."""

    calls, few = 0, 10**9

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Keeping.calls += 1
        ctx.kept = [x.clone() for _ in range(1 if Keeping.calls <= Keeping.few else 4)]
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


def stages(*, few: int = 10**9) -> list[nn.Module]:
    torch.manual_seed(0)
    Keeping.calls, Keeping.few = 0, few
    return [Block() for _ in range(STAGES)]


def step(run: Any, model: list[nn.Module]) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
    leaves = [p for stage in model for p in stage.parameters()]
    return [*torch.autograd.grad(run(x).square().mean(), leaves)]


def several_steps(run: Any, model: list[nn.Module]) -> None:
    for _ in range(4):
        step(run, model)


def profiled(*, verify: bool = False) -> int:
    """How often stages run before the call itself begins."""
    run = ts.Chain(stages(), budget=64 * STATE, verify=verify)
    run(torch.ones(ROWS, WIDTH))
    return Keeping.calls - STAGES


def plain(model: list[nn.Module]) -> list[torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in model:
            x = stage(x)
        return x

    return step(run, model)


def test_more_than_was_profiled_is_said_once_and_planned_for() -> None:
    wanted = plain(stages())
    model = stages(few=profiled())
    run = ts.Chain(model, budget=12 * STATE)
    with pytest.warns(ts.BudgetExceeded, match="its stages hold .* more than when they were profiled"):
        assert all(map(torch.equal, step(run, model), wanted))
    assert ts.report(run).exceeded is not None
    with pytest.raises(BudgetError) as refused:
        step(run, model)
    assert refused.value.least_nbytes is not None


def test_later_calls_stay_within_the_budget() -> None:
    wanted, budget = plain(stages()), 36 * STATE
    model = stages(few=profiled())
    run = ts.Chain(model, budget=budget)
    with pytest.warns(ts.BudgetExceeded):
        several_steps(run, model)  # each plan learns from the one before
    for _ in range(2):
        with track_memory() as meter:
            assert all(map(torch.equal, step(run, model), wanted))
        assert meter.peak_nbytes <= 1.02 * budget + 3 * STATE  # the argument, the result and what the loss makes


def test_with_verify_it_is_an_error() -> None:
    few = profiled(verify=True)
    model = stages(few=few)
    with pytest.raises(BudgetError, match="its stages hold"):
        step(ts.Chain(model, budget=12 * STATE, verify=True), model)


def test_inside_a_measurement_of_the_users_nothing_is_measured() -> None:
    few = profiled()
    run = ts.Chain(stages(few=few), budget=12 * STATE)
    x = torch.ones(ROWS, WIDTH)
    found = run(x)  # is profiled
    with track_memory():
        found.sum().backward()
    assert ts.report(run).exceeded is None
