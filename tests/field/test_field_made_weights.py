"""Weights that are made for each call, by hooks, parametrizations or the module's own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import WIDTH, assert_exact
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")


class Standardized(nn.Linear):
    """Its weight is put in its place before each call, from another parameter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())
        self.register_forward_pre_hook(self._make)

    @staticmethod
    def _make(module: Any, given: Any) -> None:
        raw = module.raw
        module.weight = (raw - raw.mean(1, keepdim=True)) / (raw.std(1, keepdim=True) + 1e-3)


class Rounded(nn.Linear):
    """Trained as if its weight were rounded."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shown = self.weight + (torch.round(self.weight * 16) / 16 - self.weight).detach()
        return F.linear(x, self.shown, self.bias)


class Generated(nn.Module):
    """A small network makes the weight of the layer, which functional_call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.maker = nn.Linear(WIDTH, WIDTH), nn.Linear(4, WIDTH * WIDTH)
        self.register_buffer("code", torch.randn(4))

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.layer.weight + self.maker(self.code).view(WIDTH, WIDTH)
        return torch.func.functional_call(self.layer, {"weight": weight}, (x,))


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Cached(nn.Module):
    """A parametrized weight used twice in a call, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", Halved())

    def forward(self, x: torch.Tensor) -> Any:
        with parametrize.cached():
            return self.layer(torch.tanh(self.layer(x)))


def several_iterations() -> nn.Module:
    return spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=3)


def pruned() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    prune.random_unstructured(layer, "weight", 0.3)
    prune.l1_unstructured(layer, "bias", 2)
    return layer


def pruned_twice() -> nn.Module:
    layer = pruned()
    prune.ln_structured(layer, "weight", 0.2, n=2, dim=0)
    return layer


MADE = {
    "spectral_norm of three iterations": several_iterations,
    "spectral_norm in evaluation": lambda: several_iterations().eval(),
    "pruned": pruned,
    "pruned twice": pruned_twice,
    "symmetric": lambda: parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Halved()),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "cached": Cached,
    "standardized": Standardized,
    "rounded": Rounded,
    "generated": Generated,
}


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.made = MADE[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.made(x))


@pytest.mark.parametrize("kind", MADE)
def test_exact_within_the_budget(kind: str, tmp_path: Path) -> None:
    assert_exact(lambda: nn.Sequential(*[Block(kind) for _ in range(4)]), tmp_path)
