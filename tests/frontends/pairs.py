"""A plain and a streamed model side by side."""

from collections.abc import Callable
from typing import Any

import torch
from exact import assert_same, seed
from place import DEVICE
from streamable import WIDTH, Chained, Model, dense, numbers
from streaming import everything, gradients_of
from torch import nn

import tapestream as ts

CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), numbers(3, WIDTH))
Pair = tuple[nn.Module, nn.Module, Any, Any]


def sgd(model: nn.Module, update: str = "step") -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)


def both(pair: Pair, run: Callable[[nn.Module, Any], None], steps: int = 3) -> None:
    """``run`` some steps on both; compare gradients before and weights after each."""
    seen: list[dict[str, Any]] = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        found = {}
        for step in range(steps):
            run(model, optimizer)
            found |= {f"{step} gradient {n}": g for n, g in gradients_of(model).items()}
            optimizer.step()
            optimizer.zero_grad()
            found |= everything(model, f"{step} ")
        seen.append(found)
    assert_same(*seen)


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH, device=DEVICE)
