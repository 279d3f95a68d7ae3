"""Equal stages give equal bytes, whatever the process did before."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tapestream.costs import Profile
from tapestream.models.gpt import GPT, GPTConfig
from tapestream.planning.profile import profile_stages
from tapestream.runner.stage import Stage
from tapestream.runner.state import take_apart
from tapestream.storage.meter import track_memory

Chained = tuple[list[Callable[[Any], Any]], torch.Tensor]


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Remembers(nn.Module):
    """Keeps a tensor of its last run, with its graph, as old modules of weight normalisation do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(16, 16), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.tanh(self.linear.weight)
        return F.linear(x, self.last)


class Litters(nn.Module):
    """Leaves garbage in cycles, and makes enough objects for the collector to come by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ring: list[Any] = [self.linear(x).detach()]
        ring.append(ring)
        assert len([[k] for k in range(3000)]) == 3000
        return x + self.linear(x)


class First(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def gpt() -> Chained:
    return list(GPT(GPTConfig(3, 16, 2, vocabulary=17, context=8, dropout=0.1)).blocks), torch.randn(2, 8, 16)


def convolutions() -> Chained:
    stages = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(k))
        for k in (1, 2)
    ]
    return list(stages), torch.randn(2, 4, 8, 8)


CHAINS: dict[str, Callable[[], Chained]] = {
    "gpt": gpt,
    "convolutions": convolutions,
    "lstm": lambda: ([First(16, 16, batch_first=True) for _ in range(3)], torch.randn(2, 5, 16)),
    "attention": lambda: ([Attend() for _ in range(3)], torch.randn(2, 8, 16)),
    "remembers": lambda: ([Remembers() for _ in range(3)], torch.randn(2, 16)),
    "litters": lambda: ([Litters() for _ in range(3)], torch.randn(2, 16)),
    "spectral": lambda: (
        [nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh()) for _ in range(3)],
        torch.randn(2, 16),
    ),
}


def nbytes_of(profile: Profile) -> list[dict[str, Any]]:
    """Everything in it but seconds."""
    found = [{f.name: getattr(c, f.name) for f in fields(c) if not f.name.endswith("seconds")} for c in profile.stages]
    return [*found, {"carried": profile.carried}]


def profiled(name: str) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    stages, x = CHAINS[name]()
    state, _ = take_apart(x.requires_grad_())
    profile, _, _ = profile_stages([Stage(k, s) for k, s in enumerate(stages)], state, torch.device("cpu"))
    return nbytes_of(profile)


def disturb(seed: int) -> None:
    """Free unseen what a meter saw, so that it remembers sizes where other tensors will lie; leave a ring behind."""
    sizes = torch.randint(1, 2000, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    with track_memory():
        kept = [torch.empty(size) for size in sizes]
    ring: list[Any] = [torch.empty(sizes[0])]
    ring.append(ring)
    del kept


@pytest.mark.parametrize("name", CHAINS)
def test_equal_stages_give_equal_bytes(name: str) -> None:
    found = []
    for k in range(5):
        found.append(profiled(name))
        disturb(k)
        profiled([*CHAINS][k])
        disturb(100 + k)
    assert found == found[:1] * 5
