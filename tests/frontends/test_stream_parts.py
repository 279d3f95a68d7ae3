"""Calls that do not begin with the model: `forward` called directly, a part that holds blocks, a block by itself,
blocks inside of an `autograd.Function`. Exact at an ample and at the least budget, or refused by name."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Trace, assert_same, copy_of
from streaming import DIRECT, gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import tapestream as ts
from tapestream.errors import BudgetError, GradientError

WIDTH = 8
Way = Callable[[Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.drop(torch.tanh(self.norm(self.linear(x))))
        return mixed + x


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, *, left_out: int = -1) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == left_out else layer(x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.other = nn.Linear(WIDTH, WIDTH), Body(), Body()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.other(self.body(self.first(x))))
        return out


def rows() -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def one_by_one(model: Net) -> torch.Tensor:
    x = model.first(rows())
    for layer in model.body.layers:
        x = layer(x)
    return x


def without_gradients(model: Net) -> torch.Tensor:
    with torch.no_grad():
        a = model.body.forward(rows())
        b = model.body.layers[0].forward(a)
        c = model.forward(b)
    made: torch.Tensor = model.body(a)
    return made + c.mean()


def behind_the_model(model: Net) -> torch.Tensor:
    out: torch.Tensor = model.body.layers[0](model(rows()).repeat(1, WIDTH // 2))
    return out


def in_a_checkpoint(model: Net) -> torch.Tensor:
    out: torch.Tensor = checkpoint(model.body.layers[0], model.first(rows()), use_reentrant=True)
    return out


WAYS: dict[str, Way] = {
    "the model's forward": lambda m: m.forward(rows()),
    "a part": lambda m: m.body(rows()),
    "a part's forward": lambda m: m.body.forward(m.first(rows())),
    "a part without one of its blocks": lambda m: m.body(rows(), left_out=1),
    "two parts": lambda m: m.head(m.other(m.body(m.first(rows())))),
    "a part, and the model": lambda m: m.body(rows()).mean() + m(rows()).square(),
    "a block's forward": lambda m: m.body.layers[2].forward(rows()),
    "a block twice": lambda m: m.body.layers[1](rows()) * m.body.layers[1](rows() + 1),
    "blocks one by one": one_by_one,
    "without gradients": without_gradients,
    "a block behind the model": behind_the_model,
    "a block in a checkpoint": in_a_checkpoint,
}


def trained(model: nn.Module, way: Way) -> Trace:
    """Two backwards whose gradients are added up, then one from none."""
    trace: Trace = {}
    for step in range(3):
        torch.manual_seed(step)
        loss = way(model).square().mean()
        loss.backward()
        trace[f"{step} loss"] = copy_of(loss)
        trace |= {f"{step} {name}": t for name, t in gradients_of(model).items()}
        trace |= {f"{step} {name}": copy_of(t) for name, t in model.named_buffers()}
        if step == 1:
            model.zero_grad()
    return trace | {"generator": torch.get_rng_state()}


def streamed(make: Callable[[], nn.Module], way: Way, budget: int, folder: Path | None) -> Trace:
    torch.manual_seed(0)
    where: dict[str, Any] = {"home": "device"} if folder is None else {"home": "disk", "folder": folder}
    model = ts.stream(make(), device="cpu", budget=budget, machine=DIRECT, **where)
    try:
        return trained(model, way)
    finally:
        ts.unstream(model)


def at_the_least(make: Callable[[], nn.Module], way: Way, folder: Path | None) -> Trace:
    budget = 1
    for _ in range(12):
        try:
            return streamed(make, way, budget, folder)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
    raise AssertionError("each budget named was refused in turn")


def plain(make: Callable[[], nn.Module], way: Way) -> Trace:
    torch.manual_seed(0)
    return trained(make(), way)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize("name", WAYS)
def test_exact(name: str, disk: bool, tmp_path: Path) -> None:
    expected, folder = plain(Net, WAYS[name]), tmp_path if disk else None
    assert_same(expected, streamed(Net, WAYS[name], 2**30, folder))
    try:
        assert_same(expected, at_the_least(Net, WAYS[name], folder))
    except GradientError as error:
        assert not disk
        assert name in ("a part, and the model", "a block twice", "a block behind the model")
        assert "gradients would be added in another order" in str(error)  # noqa: PT017


def test_classes_and_signatures_are_the_users() -> None:
    model = ts.stream(Net(), device="cpu", budget=2**30, home="device")
    assert isinstance(model.body, Body)
    assert type(model.body).forward is Body.forward
    assert inspect.signature(model.body.forward) == inspect.signature(Body().forward)
    ts.unstream(model)
    assert [type(m) for m in (model, model.body, model.body.layers[0])] == [Net, Body, Block]
    assert not any("tapestream" in name for m in model.modules() for name in vars(m))


# -- inside of an autograd.Function ---------------------------------------------------------------------------------


class Reversible(torch.autograd.Function):
    """Makes what it is given again from what it has made, block by block."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        for block in blocks:
            a, b = b, a + block(b)
        ctx.blocks, out = blocks, torch.cat([a, b], -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        (a, b), (of_a, of_b) = out.chunk(2, -1), cotangent.chunk(2, -1)
        for block in reversed(ctx.blocks):
            with torch.enable_grad():
                again = a.detach().requires_grad_()
                made = block(again)
                made.backward(of_b)
            a, b, of_a, of_b = b - made.detach(), a, of_b, of_a + again.grad
        return torch.cat([of_a, of_b], -1), None


class Again(torch.autograd.Function):
    """A checkpoint of one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        ctx.blocks = blocks
        ctx.save_for_backward(x)
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            state = given = x.detach().requires_grad_()
            for block in ctx.blocks:
                state = block(state)
            state.backward(cotangent)
        return given.grad, None


class Gate(torch.autograd.Function):
    """Uses a block without gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> torch.Tensor:
        return x * block(x).mean()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        return cotangent, None


class Halves(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.kind = nn.Linear(2 * WIDTH, 2 * WIDTH), kind
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.pair = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        x, layers = self.first(x), self.layers
        half = x[:, :WIDTH]
        match self.kind:
            case "reversible":
                return Reversible.apply(x, layers)
            case "behind blocks":
                return Reversible.apply(torch.cat([layers[0](half), layers[1](x[:, WIDTH:])], -1), layers[2:])
            case "before blocks":
                return layers[3](Reversible.apply(x, layers[:3])[:, :WIDTH])
            case "between blocks":
                inner = Reversible.apply(torch.cat([layers[0](half), half], -1), layers[1:3])
                return layers[3](inner[:, :WIDTH])
            case "a block that is used before":
                return Reversible.apply(torch.cat([layers[0](half), half], -1), layers[:2])
            case "a checkpoint":
                return Again.apply(half, layers)
            case "a checkpoint of a part":
                return Again.apply(half, [self.pair])
            case _:
                return Gate.apply(layers[0](half), layers[1])


KINDS = (
    "reversible", "behind blocks", "before blocks", "a block that is used before", "a checkpoint",
    "a checkpoint of a part", "a gate",
)  # fmt: skip


def halves(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(torch.randn(16, 2 * WIDTH, generator=torch.Generator().manual_seed(1)))
    return out


@pytest.mark.thinned(3)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_called_in_a_function(kind: str, disk: bool, tmp_path: Path) -> None:
    expected, folder = plain(lambda: Halves(kind), halves), tmp_path if disk else None
    assert_same(expected, streamed(lambda: Halves(kind), halves, 2**30, folder))
    assert_same(expected, at_the_least(lambda: Halves(kind), halves, folder))


def test_a_function_between_blocks(tmp_path: Path) -> None:
    """Its backward runs in the midst of theirs: refused by name where blocks come and go."""
    expected = plain(lambda: Halves("between blocks"), halves)
    assert_same(expected, streamed(lambda: Halves("between blocks"), halves, 2**30, None))
    with pytest.raises(GradientError, match="code that runs in its midst"):
        streamed(lambda: Halves("between blocks"), halves, 2**30, tmp_path)
