"""What stages and blocks leave in attributes lives until the next run: it is in the budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE
from streaming import options_of
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of
from tapestream.storage.meter import track_memory

WIDTH, ROWS, COUNT = 32, 256, 12
STATE = 4 * WIDTH * ROWS


class Showing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.shown = nn.Linear(WIDTH, WIDTH), how, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if self.how == "attribute":
            self.shown = y.detach()
        elif self.how == "list":
            self.shown = [y.detach() * 2]
        elif self.how == "dict":
            self.__dict__.setdefault("store", {})["last"] = y.detach() + 1
        return y

    def forget(self) -> None:
        self.shown = None
        self.__dict__.pop("store", None)


def peak(net: Any, layers: list[Showing], x: torch.Tensor) -> int:
    """Of a step, with all that it leaves."""
    for layer in layers:
        layer.forget()
    with track_memory(DEVICE) as meter:
        net(x).square().mean().backward()
    for layer in layers:
        for p in layer.parameters():
            p.grad = None
    return meter.peak_nbytes


@pytest.mark.parametrize("how", ["attribute", "list", "dict"])
def test_a_chain_counts_it(how: str) -> None:
    torch.manual_seed(1)
    layers = [Showing(how).to(DEVICE) for _ in range(COUNT)]
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    with pytest.raises(BudgetError) as refused:
        ts.Chain(layers, budget=1)(x)
    least = refused.value.least_nbytes
    assert least is not None
    assert least > COUNT * STATE
    net = ts.Chain(layers, budget=least)
    net(x).square().mean().backward()
    for layer in layers:
        layer.zero_grad()
    gradients = sum(4 * p.numel() for layer in layers for p in layer.parameters())
    assert peak(net, layers, x) <= limit_of(least) + gradients


@pytest.mark.parametrize("how", ["attribute", "list", "dict"])
def test_a_streamed_model_counts_it(how: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)

    def streamed(budget: int) -> nn.Module:
        model = nn.Sequential(*[Showing(how) for _ in range(COUNT)])
        return ts.stream(model, budget=budget, **options_of("auto", tmp_path))

    model = streamed(1)
    with pytest.raises(BudgetError, match="in attributes") as refused:
        model(x)
    ts.unstream(model)
    least = refused.value.least_nbytes
    assert least is not None
    assert least > COUNT * STATE
    model = streamed(least)
    layers = [block for block in model.modules() if isinstance(block, Showing)]
    model(x).square().mean().backward()
    model.zero_grad()
    for layer in layers:
        layer.forget()
    with track_memory(DEVICE) as meter:
        model(x).square().mean().backward()
    ts.unstream(model)
    assert meter.peak_nbytes <= limit_of(least)
