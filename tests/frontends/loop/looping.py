"""Steps of many kinds, and a plain Python loop to compare with."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tapestream as ts

Made = tuple[Callable[..., Any], Any, list[Tensor]]
"""A step, an initial state, and the tensors whose gradients are compared."""


def seeded(seed: int = 0) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)


def tanh_rnn() -> Made:
    weight, bias = torch.randn(6, 6).requires_grad_(), torch.randn(6).requires_grad_()
    return lambda h: torch.tanh(torch.addmm(bias, h, weight)), torch.randn(3, 6).requires_grad_(), [weight, bias]


def lstm_cell() -> Made:
    cell = nn.LSTMCell(5, 5)

    def step(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        return cell(h, (h, c))

    return step, (torch.randn(3, 5).requires_grad_(), torch.randn(3, 5)), list(cell.parameters())


def shared_twice() -> Made:
    """One weight used three times in a step, beside a state that is returned twice."""
    weight = (0.5 * torch.randn(4, 4)).requires_grad_()

    def step(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a, b = state
        new = torch.tanh(a @ weight + (b @ weight) * torch.sigmoid(a @ weight.t()))
        return new, new

    return step, (torch.randn(2, 4).requires_grad_(), torch.randn(2, 4).requires_grad_()), [weight]


def dropout_module() -> Made:
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())
    return net, torch.randn(4, 6).requires_grad_(), list(net.parameters())


def numpy_noise() -> Made:
    weight = torch.randn(4, 4).requires_grad_()

    def step(h: Tensor) -> Tensor:
        return torch.tanh(h @ weight + torch.from_numpy(numpy.random.randn(4)).to(h))

    return step, torch.randn(2, 4), [weight]


def own_generators() -> Made:
    """Draws from generators that are objects of its own, one of them in every third step alone."""
    weight = torch.randn(4, 4).requires_grad_()
    torch_made, numpy_made = torch.Generator(weight.device).manual_seed(3), numpy.random.default_rng(4)
    python_made, legacy = random.Random(5), numpy.random.RandomState(6)

    def step(state: tuple[Tensor, int]) -> tuple[Tensor, int]:
        h, t = state
        noise = torch.randn(4, generator=torch_made) + numpy_made.random() + legacy.rand()
        return torch.tanh(h @ weight + noise + (python_made.random() if t % 3 == 0 else 0)), t + 1

    return step, (torch.randn(2, 4), 0), [weight]


def batch_norm() -> Made:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    return net, torch.randn(5, 4).requires_grad_(), list(net.parameters())


def in_place() -> Made:
    """Writes into the state that it is given, and into what it made."""
    weight = (0.3 * torch.randn(5, 5)).requires_grad_()

    def step(state: dict[str, Tensor]) -> dict[str, Tensor]:
        u, v = state["u"], state["v"]
        v.mul_(0.9).add_(u @ weight)
        u = torch.sin(u) + 0.1 * v
        u[..., 0] *= 0.5
        return {"u": u, "v": v}

    start = {"u": torch.randn(3, 5).requires_grad_(), "v": torch.randn(3, 5)}
    return step, start, [weight]


def integers_and_flags() -> Made:
    weight = (0.5 * torch.randn(4, 4)).requires_grad_()

    def step(state: dict[str, Any]) -> dict[str, Any]:
        count, odd, h = state["count"], state["odd"], state["h"]
        table = torch.roll(state["table"], 1)
        h = torch.tanh(h @ weight) if odd else torch.sin(h + weight[table[0]])
        return {"h": h * (1 + 1 / count), "count": count + 1, "odd": not odd, "table": table, "name": state["name"]}

    start = {"h": torch.randn(2, 4).requires_grad_(), "count": 1, "odd": True, "table": torch.arange(4), "name": "a"}
    return step, start, [weight]


def nested() -> Made:
    """A tree of containers within containers."""
    weight = (0.5 * torch.randn(4, 4)).requires_grad_()

    def step(state: dict[str, Any]) -> dict[str, Any]:
        (h, count), c = state["pair"], state["rest"][0]["c"]
        h = torch.tanh(h @ weight + c)
        return {"pair": (h, count + 1), "rest": [{"c": 0.9 * c + h.mean() / count}], "name": "b"}

    start = {"pair": (torch.randn(2, 4), 1), "rest": [{"c": torch.zeros(4).requires_grad_()}], "name": "b"}
    return step, start, [weight]


def captured() -> Made:
    """Tensors computed before the loop: one from a parameter that the step uses too, one from the other."""
    raw = torch.randn(4).requires_grad_()
    positive = nn.functional.softplus(raw)
    scaled = positive * 0.1

    def step(h: Tensor) -> Tensor:
        return torch.tanh(h * positive + scaled - 0.2 * raw)

    return step, torch.randn(3, 4).requires_grad_(), [raw]


class Solver(nn.Module):
    """Holds a non-leaf tensor as an attribute and a parameter that only every third step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(4))
        self.rare = nn.Parameter(torch.randn(4))
        self.speed = torch.sigmoid(self.raw)

    def forward(self, state: tuple[Tensor, int]) -> tuple[Tensor, int]:
        u, t = state
        u = u + 0.1 * self.speed * torch.cos(u)
        return (u * torch.sigmoid(self.rare) if t % 3 == 2 else u), t + 1


def rarely_used() -> Made:
    solver = Solver()
    return solver, (torch.randn(2, 4), 0), list(solver.parameters())


def inner_gradient() -> Made:
    """Gradient descent whose step size gets a gradient."""
    rate, data = torch.tensor(0.1).requires_grad_(), torch.randn(6, 3)

    def step(w: Tensor) -> Tensor:
        with torch.enable_grad():
            w = w if w.requires_grad else w.requires_grad_()
            loss = (torch.tanh(data @ w) ** 2).sum()
            (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        return w - torch.exp(rate) * 0.05 * gradient

    return step, torch.randn(3).requires_grad_(), [rate]


def passed_through() -> Made:
    """A state with a tensor that no step changes."""

    def step(state: list[Tensor]) -> list[Tensor]:
        h, weight = state
        return [torch.tanh(h @ weight), weight]

    return step, [torch.randn(2, 4).requires_grad_(), torch.randn(4, 4).requires_grad_()], []


def double_precision_view() -> Made:
    """The next state is a view of a larger tensor."""
    weight = torch.randn(4, 8, dtype=torch.float64).requires_grad_()
    return lambda h: torch.sin(h @ weight)[:, ::2], torch.randn(3, 4, dtype=torch.float64).requires_grad_(), [weight]


KINDS = [
    tanh_rnn, lstm_cell, shared_twice, dropout_module, numpy_noise, own_generators, batch_norm, in_place,
    integers_and_flags, nested, captured, rarely_used, inner_gradient, passed_through, double_precision_view,
]  # fmt: skip


@dataclass
class Result:
    state: Any
    gradients: list[Tensor | None]
    extra: list[Tensor]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def starting(state: Any) -> Any:
    """What a plain loop may write into: the tensors themselves, not leaves."""
    return pytree.tree_map_only(Tensor, lambda t: t * 1 if t.requires_grad else t.clone(), state)


def plain(step: Callable[..., Any], state: Any, steps: int) -> Any:
    for _ in range(steps):
        state = step(state)
    return state


def loss_of(*trees: Any) -> Tensor:
    total = torch.zeros(())
    for i, tensor in enumerate(t for t in tensors_of(trees) if t.is_floating_point() and t.requires_grad):
        weights = torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype) + i).reshape(tensor.shape)
        total = total + (tensor * weights).sum().float()
    return total


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def differentiated(kind: Callable[[], Made], steps: int, loop: dict[str, Any] | None) -> tuple[Result, ts.Loop | None]:
    """A fresh program of a kind, run plainly (None) or by a Loop with these options, and differentiated."""
    seeded()
    step, state, parameters = kind()
    leaves = [t for t in tensors_of(state) if t.requires_grad]
    seeded(1)
    run = None
    if loop is None:
        final = plain(step, starting(state), steps)
    else:
        run = ts.Loop(step, **loop)
        final = run(state, steps=steps)
    after = torch.get_rng_state()
    loss_of(final).backward()
    gradients = [t.grad for t in (*leaves, *parameters)]
    buffers = list(step.buffers()) if isinstance(step, nn.Module) else []
    return Result(final, gradients, [*buffers, after, torch.tensor(numpy.random.rand())]), run


def assert_equal(one: Result, other: Result) -> None:
    ours, theirs = pytree.tree_leaves(one.state), pytree.tree_leaves(other.state)
    assert pytree.tree_structure(one.state) == pytree.tree_structure(other.state)
    for a, b in zip(ours, theirs, strict=True):
        assert same(a, b) if isinstance(a, Tensor) else a == b
    assert all(same(a, b) for a, b in zip(one.gradients, other.gradients, strict=True))
    assert all(same(a, b) for a, b in zip(one.extra, other.extra, strict=True))


class Ticks:
    """Counts runs of a step, recomputes too. A step that counts them otherwise is refused, as it runs again."""

    def __init__(self):
        self._count = itertools.count()

    def tick(self):
        next(self._count)

    @property
    def number(self):
        return int(repr(self._count).removeprefix("count(").removesuffix(")"))
