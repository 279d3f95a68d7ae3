"""Several chains whose least, added up, is more than everything stored: this is the least that is named, and works."""

import random

import pytest
import torch
from torch import nn

import tapestream as ts

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Chains(nn.Module):
    """Residuals are added by the model: a chain each, of one block or of several."""

    def __init__(self, number: int, length: int, width: int, hidden: int) -> None:
        super().__init__()
        self.length = length
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(number * length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.blocks), self.length):
            y = x
            for block in self.blocks[first : first + self.length]:
                y = block(y)
            x = x + y
        return x.square().mean()


def drawn(number: int) -> tuple[Chains, torch.Tensor]:
    draw = random.Random(number)
    torch.manual_seed(number)
    model = Chains(draw.randint(2, 12), draw.randint(1, 3), 32 * draw.randint(1, 3), 64 * draw.randint(1, 3))
    width = model.blocks[0].a.in_features
    return model, torch.randn(32 * draw.randint(1, 6), width)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for _ in range(2):
        loss = model(x)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        if optimizer is not None:
            optimizer.step()
        for p in model.parameters():
            p.grad = None
    return found


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("trains", [False, True])
def test_the_least_is_no_more_than_everything_stored_and_works(number: int, trains: bool) -> None:
    def ours(budget: int) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        model = ts.stream(drawn(number)[0], budget=budget, device="cpu", home="device")
        return model, ts.optimizer(model, torch.optim.Adam, foreach=False) if trains else None

    x = drawn(number)[1]
    with pytest.raises(ts.BudgetError) as refused:
        ours(1)[0](x)
    least, offered = refused.value.least_nbytes, refused.value.budgets
    assert least is not None
    assert least == offered[0].nbytes <= offered[-1].nbytes
    assert offered[-1].times_plain <= 1.001
    model = drawn(number)[0]
    theirs = torch.optim.Adam(model.parameters(), foreach=False) if trains else None
    for a, b in zip(steps(*ours(least), x), steps(model, theirs, x), strict=True):
        assert torch.equal(a, b)
    model, optimizer = ours(least)
    assert held_in(model, optimizer, x) <= least
    model = drawn(number)[0]
    plain = held_in(model, torch.optim.Adam(model.parameters(), foreach=False) if trains else None, x)
    assert least <= 1.2 * plain  # what a chain gives on counts as held


def held_in(model: nn.Module, optimizer: torch.optim.Optimizer | None, x: torch.Tensor) -> int:
    """Most bytes held in a step after the first."""

    def step() -> None:
        model(x).backward()
        if optimizer is not None:
            optimizer.step()
        for p in model.parameters():
            p.grad = None

    step()
    with ts.track_memory() as meter:
        step()
    return meter.peak_nbytes + sum(p.nbytes for p in model.parameters()) * (1 if optimizer is None else 3)
