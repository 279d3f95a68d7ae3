"""Models whose blocks are held in other ways than one list that is walked along: found without help, and exact."""

import copy

import pytest
import torch
from torch import nn

import tapestream as ts


def part(shared: nn.Module) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), shared, nn.Linear(64, 16))


class ListOfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.GELU()
        self.layers = nn.ModuleList(nn.ModuleList([part(shared), part(shared)]) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix, feed in self.layers:
            x = mix(x) + x
            x = feed(x) + x
        return x.square().mean()


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Dropout(0.1)
        self.layers = nn.ModuleDict({f"layer{number}": part(shared) for number in range(6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in sorted(self.layers):
            x = x + self.layers[name](x)
        return x.square().mean()


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.ModuleList(part(nn.GELU()) for _ in range(6))
        self.stages = nn.ModuleList([nn.Sequential(*self.flat[:3]), nn.Sequential(*self.flat[3:])])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", [ListOfLists, Dictionary, TwoWays])
def test_exact_at_the_least_budget(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plain = kind()
    with pytest.raises(ts.BudgetError) as refused:
        ts.stream(copy.deepcopy(plain), device="cpu", budget=1000)(torch.randn(32, 16))
    assert refused.value.least_nbytes is not None
    ours = ts.stream(copy.deepcopy(plain), device="cpu", budget=refused.value.least_nbytes)
    for step in range(3):
        for model in (plain, ours):
            torch.manual_seed(step)
            model.zero_grad()
            model(torch.randn(32, 16)).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))
    ts.unstream(ours)


class Picky(nn.Module):
    def __init__(self, usable: bool) -> None:
        super().__init__()
        self.linear, self.usable = nn.Linear(16, 16), usable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.usable:
            raise ValueError("this block is for another mode")
        return torch.tanh(self.linear(x))


class Skipping(nn.Module):
    """Its first block is never called, and could not be."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Picky(usable=number > 0) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[1:]:
            x = block(x)
        return x.square().mean()


def test_a_first_block_that_is_never_called() -> None:
    """It is tried, since a layer may be dropped at random, and leaves nothing behind."""
    torch.manual_seed(0)
    plain = Skipping()
    ours = ts.stream(copy.deepcopy(plain), device="cpu", budget=2**30)
    x = torch.randn(4, 16)
    for model in (plain, ours):
        model(x).backward()
    pairs = list(zip(plain.blocks[1:].parameters(), ours.blocks[1:].parameters(), strict=True))
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    ts.unstream(ours)
