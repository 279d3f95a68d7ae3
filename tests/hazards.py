"""Networks that run into the silent failures known in this field."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

WIDTH, DEPTH = 32, 6


class Net(nn.Module):
    """Blocks one after the other; autocast around all of them where asked for."""

    def __init__(self, blocks: list[nn.Module], autocast: bool = False) -> None:
        super().__init__()
        self.blocks, self.autocast = nn.ModuleList(blocks), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """One linear map, and what may go wrong after it."""

    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(WIDTH, WIDTH), nn.Sequential(*after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x))  # type: ignore[no-any-return]


class Drawn(nn.Module):
    """Multiplies by what Python and NumPy draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (0.5 + random.random()) * float(numpy.random.uniform(0.5, 1.5))


class Paired(nn.Module):
    """Multiplies by what NumPy draws two at a time: every second number has waited and leaves its words alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (1 + 0.1 * float(numpy.random.standard_normal()))


class Single(nn.Module):
    """To single precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Adapted(nn.Module):
    """A frozen map with a small trainable one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class OnContext(torch.autograd.Function):
    """Keeps its tensors as attributes of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.scale = x, scale
        return torch.sin(x) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * torch.cos(ctx.x) * ctx.scale, None


class Scaled(nn.Module):
    """A Function that keeps its tensors on the context, one of them the parameter of a block that may be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(OnContext.apply(self.linear(x), self.scale))  # type: ignore[no-untyped-call]


class Refilling(nn.Module):
    """Writes into what it is given, and fills one buffer anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scratch", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.scratch.copy_(y.mean(0))
        y = y + self.scratch
        return y.mul_(0.9).clamp_(min=-0.8)


class Alike(nn.Module):
    """Every block takes the weight of the one before it."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if weight is not None:
            self.linear.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        return functional.linear(y, self.linear.weight) * 0.5


def tied() -> list[nn.Module]:
    first = Alike()
    return [first, *(Alike(first.linear.weight) for _ in range(DEPTH - 1))]


def norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, momentum=0.3)


class Skipping(nn.Module):
    """Gives on what the first block was given; the last one needs it again."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, state: Any) -> Any:
        x, first = state if isinstance(state, tuple) else (state, torch.sin(state))
        x = torch.tanh(self.linear(x))
        return x * first + first if self.last else (x, first)


class StateOnContext(nn.Module):
    """A Function that keeps on the context what the block was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(OnContext.apply(x, self.scale))  # type: ignore[no-any-return, no-untyped-call]


class ResultOnContext(torch.autograd.Function):
    """Keeps what it returns as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.y = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * (1 - ctx.y * ctx.y)


class Kept(nn.Module):
    """A Function that keeps on the context what the block gives on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ResultOnContext.apply(torch.sin(self.linear(x)))  # type: ignore[no-any-return, no-untyped-call]


class Overwriting(nn.Module):
    """Writes into what it is given, as a whole and through a view; what gave it has saved nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.9)
        x[:, ::3] += 0.25
        return self.linear(torch.sin(x))  # type: ignore[no-any-return]


def begun(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The state that `Delayed` begins with."""
    return x, torch.sin(x), torch.cos(x), torch.sin(2 * x)


def ended(state: Any) -> torch.Tensor:
    """One tensor of the state of a loop."""
    return state[0] * state[3] + state[2] if isinstance(state, tuple) else state  # type: ignore[no-any-return]


class Delayed(nn.Module):
    """Needs what the block three before it was given, and what the first one was, which all others give on."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, state: Any) -> Any:
        x, one, two, first = state if isinstance(state, tuple) else begun(state)
        y = torch.tanh(self.linear(x)) + torch.sin(two) * first
        return y * first if self.last else (y, x, one, first)


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [Block(nn.Dropout(0.3), nn.Tanh()) for _ in range(DEPTH)],
    "rrelu": lambda: [Block(nn.RReLU(), nn.Dropout(0.1)) for _ in range(DEPTH)],
    "rrelu in place": lambda: [Block(nn.RReLU(inplace=True)) for _ in range(DEPTH)],
    "python's and numpy's numbers": lambda: [Block(Drawn()) for _ in range(DEPTH)],
    "numpy's pairs of numbers": lambda: [Block(Paired()) for _ in range(DEPTH)],
    "batch norm": lambda: [Block(norm(), nn.Tanh()) for _ in range(DEPTH)],
    "batch norm and relu in place": lambda: [Block(norm(), nn.ReLU(inplace=True)) for _ in range(DEPTH)],
    "autocast": lambda: [Block(nn.LayerNorm(WIDTH), nn.GELU(), Single()) for _ in range(DEPTH)],
    "frozen": lambda: [Block(nn.Tanh()).requires_grad_(k % 2 == 1) for k in range(DEPTH)],
    "frozen first": lambda: [Block(nn.Tanh()).requires_grad_(k > 2) for k in range(DEPTH)],
    "adapters": lambda: [Adapted() for _ in range(DEPTH)],
    "on the context": lambda: [Scaled() for _ in range(DEPTH)],
    "its state on the context": lambda: [StateOnContext() for _ in range(DEPTH)],
    "its result on the context": lambda: [Kept() for _ in range(DEPTH)],
    "in place on its own tensors": lambda: [Refilling() for _ in range(DEPTH)],
    "in place on a kept state": lambda: [Overwriting() for _ in range(DEPTH)],
    "tied weights": tied,
    "a skip": lambda: [Skipping(k == DEPTH - 1) for k in range(DEPTH)],
    "a skip of three": lambda: [Delayed(k == DEPTH - 1) for k in range(DEPTH)],
}
TOGETHER = {"tied weights", "a skip", "frozen", "frozen first"}
"""Blocks that differ: a step that is every one of them in turn stands for them in a loop."""


def net_of(kind: str) -> Net:
    torch.manual_seed(7)
    return Net(KINDS[kind](), autocast=kind == "autocast").train()
