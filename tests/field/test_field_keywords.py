"""Blocks that take what they need by keyword, in other ways from call to call and from block to block."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from both_sides import WIDTH, assert_exact, rows
from torch import nn

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")


@dataclass
class Options:
    scale: torch.Tensor
    name: str = "tanh"


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, memory: Any = None, scale: Any = 1.0, **more: Any) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * (scale.scale if isinstance(scale, Options) else scale)
        if isinstance(memory, tuple):
            y = y * torch.sigmoid(memory[0]) + memory[1]
        elif isinstance(memory, dict):
            y = y + sum(memory.values())
        elif memory is not None:
            y = y + torch.sigmoid(self.gate(memory))
        if "mask" in more:
            y = y.masked_fill(more["mask"], 0.0)
        return x + y


class ByName(Block):
    """Its input is a keyword, too."""

    def forward(self, *, x: torch.Tensor, **more: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, **more)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.blocks = nn.ModuleList((ByName if kind == "all by name" else Block)() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x = self.first(x)
        for number, block in enumerate(self.blocks):
            match self.kind:
                case "a tensor with a gradient":
                    x = block(x, memory=start)
                case "the input of the block before":
                    x, start = block(x, memory=start), x
                case "a tensor in some blocks":
                    x = block(x, memory=start) if number % 2 else block(x)
                case "all by name":
                    x = block(x=x, memory=start, scale=0.5)
                case "in another order":
                    x = block(x, scale=2.0, memory=start) if number % 2 else block(x, memory=start, scale=2.0)
                case "a pair":
                    x = block(x, memory=Pair(start, x.detach()))
                case "a dictionary":
                    x = block(x, memory={"a": start, "b": x})
                case "an object":
                    x = block(x, scale=Options(start.mean()))
                case "the same tensor twice":
                    x = block(x, memory=x, scale=x)
                case "a mask that the block does not name":
                    x = block(x, mask=start.detach() > 0)
                case "a number of each block":
                    x = block(x, scale=1.0 / (number + 1))
        return x


KINDS = (
    "a tensor with a gradient", "the input of the block before", "a tensor in some blocks", "all by name",
    "in another order", "a pair", "a dictionary", "an object", "the same tensor twice",
    "a mask that the block does not name", "a number of each block",
)  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_within_the_budget(kind: str, tmp_path: Path) -> None:
    assert_exact(lambda: Net(kind), tmp_path)


class Sometimes(Net):
    """Given a memory in every second call."""

    def __init__(self) -> None:
        super().__init__("sometimes")
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = start = self.first(x)
        self.calls += 1
        for block in self.blocks:
            x = block(x, memory=start) if self.calls % 2 else block(x, memory=None)
        return x


def test_another_set_of_keywords_in_every_call(tmp_path: Path) -> None:
    def loss(model: Any, number: int) -> torch.Tensor:
        found: torch.Tensor = model(rows(number)).square().mean()
        return found

    assert_exact(Sometimes, tmp_path, loss=loss, steps=4)
