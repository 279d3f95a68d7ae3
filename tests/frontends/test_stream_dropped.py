"""Blocks that a call leaves out, where the model adds what a block returns to what it was given."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, copy_of
from streamable import WIDTH, Dense
from streaming import gradients_of, options_of
from torch import nn

import tapestream as ts

DROPPED = [(2, 3), (0,), (4,), (1, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4), (), (1,), (0, 4)]
"""By each call. The first is profiled, and what it leaves out with it, as if blocks followed each other."""


class Net(nn.Module):
    dropped: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Dense() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for number, block in enumerate(self.blocks):
            if number not in self.dropped:
                x = x + block(nn.functional.dropout(x, 0.1))
        return x.square().mean()


def differentiated(model: Net, dropped: tuple[int, ...]) -> dict[str, Any]:
    model.zero_grad()
    model.dropped = dropped
    torch.manual_seed(3)
    loss = model(torch.ones(8, WIDTH))
    loss.backward()
    return gradients_of(model) | {"loss": copy_of(loss), "random": torch.get_rng_state()}


@pytest.mark.parametrize("home", ["disk", "device"])
def test_blocks_dropped_inside_a_residual(home: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = ts.stream(copy.deepcopy(plain), budget="1 GiB", **options_of("auto", tmp_path, home))
    for dropped in DROPPED:
        assert_same(differentiated(plain, dropped), differentiated(model, dropped))
    ts.unstream(model)
