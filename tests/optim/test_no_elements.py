"""Parameters without elements (of a layer that was pruned away, say), alone in their blocks or beside others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE
from torch import nn

import tapestream as ts


class Added(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(2 * x + sum(value.square().sum() for value in self.values))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Added(*sizes) for sizes in ((0,), (4,), (0, 3), (0, 0), (5, 0)))).to(DEVICE)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 6, device=DEVICE)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu().clone() for p in model.parameters()]


def shapes(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    states = optimizer.state_dict()["state"].values()
    return [{name: getattr(value, "shape", None) for name, value in state.items()} for state in states]


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", ["disk", "device"])
def test_exact(cls: Any, update: str, home: str, tmp_path: Path) -> None:
    options = {"lr": 0.1} if cls is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9}
    plain, model = made(), made()
    ts.stream(model, device=DEVICE, budget="1MiB", home=home, folder=tmp_path if home == "disk" else None)
    theirs, own = cls(plain.parameters(), **options), ts.optimizer(model, cls, update=update, **options)
    assert all(map(torch.equal, trained(plain, theirs), trained(model, own)))
    assert shapes(theirs) == shapes(own)
    ts.save(tmp_path / "saved", model=model, optimizer=own)
    ts.load(tmp_path / "saved", model=model, optimizer=own)
    ts.unstream(model)
