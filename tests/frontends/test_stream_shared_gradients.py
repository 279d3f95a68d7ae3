"""Autograd gives one tensor to several operands of a sum; the gradients of parameters are tensors of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from streaming import DIRECT
from torch import nn

import tapestream as ts


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.whole = (nn.Parameter(torch.randn(shape)) for shape in ((16,), (16,), (8, 16)))
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.a + self.b + self.whole


class Residual(nn.Module):
    """The gradients of neighbouring blocks are one tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    x, found = torch.ones(8, 16), []
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("block", [Sums, Residual])
@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("budget", ["24KiB", "1GiB"])
def test_clipping_scales_each_once(block: Any, home: str, budget: str, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*[block() for _ in range(6)])

    plain = made()
    theirs = stepped(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    where: dict[str, Any] = {"folder": tmp_path, "machine": DIRECT} if home == "disk" else {}
    model = ts.stream(made(), budget="1GiB" if home == "device" else budget, device="cpu", home=home, **where)
    ours = stepped(model, ts.optimizer(model, torch.optim.SGD, lr=0.1))
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))
    ts.unstream(model)
