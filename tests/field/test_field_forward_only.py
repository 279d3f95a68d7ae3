"""Calls that nobody differentiates, in other ways than ``no_grad`` around one call: within the budget, or refused with
the least that works."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import HOMES, WIDTH, streamed
from things_kept import alive, whole_peak
from torch import nn

from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")

ROWS = 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def net() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


def frozen(model: Any, x: torch.Tensor) -> Any:
    """No mode at all: nothing takes a gradient."""
    model.requires_grad_(False)
    return model(x)


def in_evaluation(model: Any, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return model.eval()(x)


def by_a_decorator(model: Any, x: torch.Tensor) -> Any:
    return torch.no_grad()(lambda: model(x))()


def block_by_block(model: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for block in model:
            x = block(x)
    return x


def frozen_block_by_block(model: Any, x: torch.Tensor) -> Any:
    model.requires_grad_(False)
    for block in model:
        x = block(x)
    return x


def again_and_again(model: Any, x: torch.Tensor) -> Any:
    """Its own results come in, as in generation."""
    with torch.no_grad():
        for _ in range(3):
            x = model(x)
    return x


def by_forward(model: Any, x: torch.Tensor) -> Any:
    with torch.set_grad_enabled(False):
        return model.forward(x)


WAYS = (
    frozen, in_evaluation, by_a_decorator, block_by_block, frozen_block_by_block, again_and_again, by_forward,
)  # fmt: skip
HOLD = (block_by_block, frozen_block_by_block, again_and_again)
"""The user holds a result that comes in again."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("way", WAYS)
def test_within_the_least(way: Callable[..., Any], home: str, tmp_path: Path) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    wanted, budget = way(net(), x), 1
    gc.collect()
    base = alive()
    for _ in range(8):
        with streamed(net, home, tmp_path, budget) as model:
            try:
                assert torch.equal(way(model, x), wanted)
                given = base + (x.nbytes if way in HOLD else 0)
                assert whole_peak(lambda: way(model, x), given) <= limit_of(budget)
                return
            except BudgetError as error:
                assert error.least_nbytes is not None  # noqa: PT017
                budget = max(error.least_nbytes, budget + 1)
    raise AssertionError("each budget named was refused in turn")
