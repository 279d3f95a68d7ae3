"""Each call looks at its first two steps before it begins: that takes no more than the plan."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tapestream as ts
from tapestream.planning.exceeded import limit_of
from tapestream.storage.meter import watch_memory

ROWS, WIDTH, STEPS = 256, 64, 8
W = (torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / 8).requires_grad_()


def step(h: torch.Tensor) -> torch.Tensor:
    return h + torch.sin(torch.tanh(h @ W))


def fed(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h + torch.sin(torch.tanh(h @ W + x))


def shown(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = fed(h, x)
    return h, h[:4].mean(1)


def written(h: torch.Tensor) -> torch.Tensor:
    return step(h.mul_(0.5))


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "alone": (step, {"steps": STEPS}),
    "inputs": (fed, {"inputs": torch.randn(STEPS, ROWS, WIDTH)}),
    "outputs": (shown, {"inputs": torch.randn(STEPS, ROWS, WIDTH), "outputs": "stack"}),
    "writes into its state": (written, {"steps": STEPS}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("times", [1.0, 1.2])
def test_stays_within_the_budget(name: str, times: float) -> None:
    function, given = CALLS[name]
    h = torch.randn(ROWS, WIDTH)
    with pytest.raises(ts.BudgetError) as raised:
        ts.Loop(function, budget=1)(h, **given)
    budget = int(times * (raised.value.least_nbytes or 0))
    loop = ts.Loop(function, budget=budget)

    def run() -> torch.Tensor:
        found = loop(h, **given)
        return found if isinstance(found, torch.Tensor) else found[0]

    run().sum().backward()  # type: ignore[no-untyped-call]
    with watch_memory() as watch:
        for _ in range(2):
            with watch.measured() as meter:
                found = run()
            found.sum().backward()  # type: ignore[no-untyped-call]
            del found
    assert meter.peak_nbytes <= limit_of(budget)
