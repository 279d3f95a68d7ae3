"""Programs inside streamed blocks, each within its own budget; a streamed model inside a program is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    """Three times the same layers, with dropout; as a program where it is given a budget."""

    def __init__(self, budget: str | None) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        self.body: Any = self.inner if budget is None else ts.Program(self.inner, budget=budget)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + self.drop(self.down(torch.tanh(self.up(x))))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Network(nn.Module):
    def __init__(self, budget: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block(budget) for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("program", ["1GiB", "1600KiB"])
@pytest.mark.parametrize("streamed", ["1GiB", "4MiB"])
@pytest.mark.parametrize("home", ["disk", "device"])
def test_programs_inside_streamed_blocks_are_exact(program: str, streamed: str, home: str, tmp_path: Path) -> None:
    x = torch.randn(ROWS, WIDTH)
    wanted, model = step(Network(), x), Network(program)
    ts.stream(model, device="cpu", budget=streamed, home=home, folder=tmp_path if home == "disk" else None)
    for _ in range(3):
        found = step(model, x)
        assert len(found) == len(wanted)
        assert all(map(torch.equal, found, wanted))
    ts.unstream(model)


def test_a_streamed_model_inside_a_program_is_refused_by_name(tmp_path: Path) -> None:
    model = ts.stream(Network(), device="cpu", budget="8MiB", folder=tmp_path)
    with pytest.raises(ts.InputError, match="streamed Network is called inside"):
        ts.Program(lambda x: model(x) * 2.0, budget="1GiB")(torch.randn(ROWS, WIDTH))
    assert step(model, torch.randn(ROWS, WIDTH))
    ts.unstream(model)
