"""A zoo of small chains, each with a way in which recomputing could go wrong."""

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

Stages = list[Callable[[Any], Any]]


def whole(state: Any) -> torch.Tensor:
    """A loss of every floating tensor of the last state."""
    return sum(t.float().square().mean() for t in tree_leaves(state) if t.is_floating_point())


def first(state: Any) -> torch.Tensor:
    """A loss of the first tensor of the last state alone."""
    return tree_leaves(state)[0].float().square().mean()


@dataclass(frozen=True)
class Case:
    """``make`` builds the stages (under a fixed seed), ``state`` the initial state around a fresh batch.

    ``slack_nbytes``: by how much profiles of these stages differ, because they keep tensors of an earlier run.
    """

    make: Callable[[], Stages]
    batch: Callable[[], torch.Tensor]
    state: Callable[[torch.Tensor], Any] = lambda x: x
    loss: Callable[[Any], torch.Tensor] = whole
    input_requires: bool = True
    autocast: bool = False
    slack_nbytes: int = 0

    def stages(self) -> Stages:
        torch.manual_seed(7)
        return self.make()


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(x))


class Head(nn.Module):
    """Logits by the embedding's own weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embedding.embedding_dim)
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.weight)


def gpt(dropout: float = 0.1, blocks: int = 4) -> Stages:
    embedding = nn.Embedding(11, 16)
    return [embedding, *(Attention(16, dropout=dropout) for _ in range(blocks)), Head(embedding)]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, width, 1),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.b(self.relu(self.norm(self.a(x)))) + x)


def resnet() -> Stages:
    return [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), *(Residual(4) for _ in range(4)), nn.Flatten(2)]


class Recurrent(nn.Module):
    """State: (sequence, [(h, c) of every layer so far])."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, state: tuple[torch.Tensor, list[Any]]) -> tuple[torch.Tensor, list[Any]]:
        x, cells = state
        y, cell = self.lstm(x)
        return y, [*cells, cell]


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        y = F.gelu(self.conv(state["x"]))
        return {"x": y, "skips": (*state["skips"], y)}  # one tensor twice


class Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2 * width, width, 3, padding=1)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        *skips, last = state["skips"]
        y = torch.relu_(self.conv(torch.cat([state["x"], last], 1)) + last)
        return {"x": y, "skips": tuple(skips)}


def unet() -> Stages:
    return [*(Down(4) for _ in range(3)), *(Up(4) for _ in range(3)), lambda state: state["x"]]


class Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(tokens, 8), nn.SiLU(), nn.Linear(8, tokens))
        self.channels = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 8), nn.SiLU(), nn.Linear(8, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x)


def old_style(norm: Callable[[nn.Module], nn.Module], module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return norm(module)


def normed() -> Stages:
    from torch.nn.utils import parametrizations, spectral_norm, weight_norm

    return [
        parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), old_style(spectral_norm, nn.Linear(6, 6)),
        nn.Tanh(),
        parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh(), old_style(weight_norm, nn.Linear(6, 6)), nn.Tanh(),
    ]  # fmt: skip


class Noisy(nn.Module):
    """Draws from all three generators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.3:  # a dropped layer
            return x
        y = self.linear(x) * float(numpy.random.uniform(0.5, 1.5))
        return F.dropout(torch.tanh(y), 0.3, self.training) + 0.1 * torch.randn_like(x)


class Force(nn.Module):
    """Calls torch.autograd.grad: the gradient of an energy is part of the output."""

    def __init__(self, width: int, *, own_leaf: bool = False) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(width, 8), nn.Softplus(), nn.Linear(8, 1))
        self.own_leaf = own_leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x.detach().clone().requires_grad_() if self.own_leaf else x
        (force,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)
        return x - 0.1 * force


class Checkpointed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Adapted(nn.Module):
    """A frozen linear map and a small trainable one beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class Balanced(nn.Module):
    """State: (x, integer steps, auxiliary loss of each stage)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]) -> Any:
        x, steps, losses = state
        y = torch.sigmoid(self.linear(x))
        return y, steps + 1, [*losses, y.var(0).mean()]


def frozen(stages: Stages, keep: Sequence[int] = ()) -> Stages:
    for k, stage in enumerate(stages):
        if isinstance(stage, nn.Module) and k not in keep:
            stage.requires_grad_(False)
    return stages


def mlp(depth: int = 5, width: int = 6) -> Stages:
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]


def tied(width: int = 6) -> Stages:
    """One weight in three modules, one of which uses it twice."""
    stages = [nn.Linear(width, width) for _ in range(4)]
    stages[2].weight = stages[0].weight
    again = Again(stages[0].weight)
    return [stages[0], nn.Tanh(), stages[1], again, nn.Tanh(), stages[2], nn.Tanh(), stages[3]]


class Again(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight)


def repeated() -> Stages:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Tanh())
    return [block, block, nn.LayerNorm(6), block, block]


def rows(*shape: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(*shape)


def tokens() -> torch.Tensor:
    return torch.randint(0, 11, (2, 8))


def columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    return x, torch.zeros(3, dtype=torch.int64), []


CASES: dict[str, Case] = {
    "gpt": Case(gpt, tokens, input_requires=False),
    "gpt_autocast": Case(gpt, tokens, input_requires=False, autocast=True),
    "resnet": Case(resnet, rows(2, 3, 6, 6)),
    "resnet_autocast": Case(resnet, rows(2, 3, 6, 6), autocast=True),
    "lstm": Case(lambda: [Recurrent(4) for _ in range(4)], rows(2, 5, 4), lambda x: (x, [])),
    "lstm_part": Case(lambda: [Recurrent(4) for _ in range(4)], rows(2, 5, 4), lambda x: (x, []), first),
    "unet": Case(unet, rows(2, 4, 8), lambda x: {"x": x, "skips": ()}),
    "mixer": Case(lambda: [Mixer(5, 4) for _ in range(4)], rows(2, 5, 4), input_requires=False),
    "normed": Case(normed, rows(3, 6), slack_nbytes=512),
    "normed_autocast": Case(normed, rows(3, 6), autocast=True, slack_nbytes=512),
    "noisy": Case(lambda: [Noisy(6) for _ in range(6)], rows(3, 6)),
    "rrelu": Case(lambda: [s for _ in range(3) for s in (nn.Linear(6, 6), nn.RReLU())], rows(3, 6)),
    "rrelu_inplace": Case(lambda: [s for _ in range(3) for s in (nn.Linear(6, 6), nn.RReLU(inplace=True))], rows(3, 6)),
    "force": Case(lambda: [Force(4) for _ in range(4)], rows(3, 4)),
    "force_own_leaf": Case(lambda: [Force(4, own_leaf=True) for _ in range(4)], rows(3, 4)),
    "checkpointed": Case(lambda: [Checkpointed(4) for _ in range(4)], rows(3, 4)),
    "adapter": Case(lambda: [Adapted(6) for _ in range(5)], rows(3, 6), input_requires=False),
    "frozen_all": Case(lambda: frozen(mlp()), rows(3, 6)),
    "frozen_some": Case(lambda: frozen(mlp(), (1, 3)), rows(3, 6), input_requires=False),
    "auxiliary": Case(lambda: [Balanced(6) for _ in range(5)], rows(3, 6), columns),
    "auxiliary_part": Case(lambda: [Balanced(6) for _ in range(5)], rows(3, 6), columns, lambda s: s[2][1] + s[2][2]),
    "tied": Case(tied, rows(3, 6)),
    "tied_autocast": Case(tied, rows(3, 6), autocast=True),
    "repeated": Case(repeated, rows(3, 6)),
    "repeated_autocast": Case(repeated, rows(3, 6), autocast=True),
}  # fmt: skip
