"""Results that backward does not reach: within the least that the losses alone need, a call works as without them, and
says so where backward reaches more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.storage.meter import track_memory

WIDTH, ROWS, BLOCKS = 32, 256, 8
Beside = Callable[[torch.Tensor], Any]

torch.manual_seed(0)
HEAD = nn.Linear(WIDTH, WIDTH)
NET = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
X = torch.randn(ROWS, WIDTH)
LEAVES = [*NET.parameters()]
KEPT: list[torch.Tensor] = []
BESIDE: dict[str, Beside] = {
    "softmax": lambda y: torch.softmax(y, 1),
    "layers": lambda y: torch.softmax(HEAD(torch.tanh(HEAD(y))), 1),
    "parts": lambda y: torch.softmax(y, 1).chunk(2),
    "two": lambda y: {"attention": torch.softmax(y, 1), "logits": torch.exp(y)},
    "a loss of its own": lambda y: (torch.exp(y), torch.exp(y).mean().detach()),
}


def program(beside: Beside | None) -> Callable[[], Any]:
    def run() -> Any:
        y = NET(X)
        other = None if beside is None else beside(y)
        return y.square().mean(), other

    return run


def least(function: Callable[[], Any]) -> int:
    with pytest.raises(BudgetError) as refused:
        ts.Program(function, budget=1, planner="revolve")()
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, LEAVES))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_within_the_least_of_the_loss_alone_all_is_as_without_the_others(beside: Beside) -> None:
    few, wanted = least(program(None)), gradients(program(None)()[0])
    run, alone = ts.Program(program(beside), budget=few), ts.Program(program(None), budget=few)
    out: Any = None
    for k in range(5):
        out = run()  # what the last turn gave lives until here
        alone()
        with track_memory() as meter:
            assert all(map(torch.equal, gradients(out[0]), wanted))
        assert meter.peak_nbytes <= few + sum(p.nbytes for p in LEAVES)
        assert run.report is not None
        assert run.report.planned == (k > 0)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_backward_that_reaches_more_is_refused_with_what_does(beside: Beside) -> None:
    few, function = least(program(None)), program(beside)

    def total(out: Any) -> torch.Tensor:
        others = out[1].values() if isinstance(out[1], dict) else out[1] if isinstance(out[1], tuple) else (out[1],)
        return sum((t.square().mean() for t in others), out[0])  # type: ignore[no-any-return]

    wanted = gradients(total(function()))
    run = ts.Program(function, budget=few)
    for _ in range(2):
        out = run()
        gradients(out[0])
    with pytest.raises(BudgetError, match="backward reaches a result of shape") as refused:
        gradients(total(run()))
    assert refused.value.least_nbytes == least(function)
    with pytest.raises(BudgetError, match="the least found to work"):
        run()  # from now on such calls are planned for all results
    for budget in (refused.value.least_nbytes, 1 << 24):
        enough = ts.Program(function, budget=budget)
        for _ in range(3):
            assert all(map(torch.equal, gradients(total(enough())), wanted))


def keeps(y: torch.Tensor) -> torch.Tensor:
    KEPT[:] = [torch.exp(y)]
    return torch.softmax(KEPT[0], 1)


def writes(y: torch.Tensor) -> torch.Tensor:
    return torch.exp(y).mul_(2)


@pytest.mark.parametrize("beside", [keeps, lambda y: y, writes, lambda y: y.exp().mean()])
def test_what_cannot_be_told_is_planned_for(beside: Beside) -> None:
    """Somebody else holds it, the loss depends on it, it writes, or is a loss itself."""
    with pytest.raises(BudgetError, match="the least found to work"):
        ts.Program(program(beside), budget=least(program(None)))()
