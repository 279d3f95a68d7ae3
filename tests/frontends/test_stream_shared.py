"""Tensors that some blocks leave in containers and objects of the call for later blocks (keys and values shared between
layers, running sums): their gradients are plain PyTorch's, at an ample and at the least budget."""

from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from exact import Trace, assert_same, copy_of
from streaming import DIRECT
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError

WIDTH, BLOCKS = 8, 5


class Pair(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Shared:
    pair: Any = None
    total: Any = 0.0
    seen: list[torch.Tensor] = field(default_factory=list)


class Slotted:
    __slots__ = ("keys",)


class Layer(nn.Module):
    """Makes keys (``number`` below 2), or takes those of the last layer that has."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.number = nn.Dropout(0.1), number

    @property
    def makes(self) -> bool:
        return self.number < 2

    def mixed(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.softmax(self.queries(x) @ keys.transpose(-1, -2), -1)) @ x


class Words(Layer):
    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if self.makes:
            shared["keys"] = self.keys(x)
        return self.mixed(x, shared["keys"])


class ByKeyword(Layer):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0, shared: Any = None) -> tuple[torch.Tensor]:
        if self.makes:
            shared["full"] = self.keys(x) * scale, torch.tanh(x)
        keys, values = shared["full"]
        return (self.mixed(x, keys) + values,)


class Appended(Layer):
    def forward(self, x: torch.Tensor, shared: list[torch.Tensor]) -> torch.Tensor:
        if self.makes:
            shared.append(self.keys(x))
        return self.mixed(x, shared[-1] if self.number != 3 else shared[0])


class Nested(Layer):
    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if self.makes:
            shared["layers"].append({"pair": Pair(self.keys(x), x * 2)})
            shared["count"] = len(shared["layers"])
        found = shared["layers"][shared["count"] - 1]["pair"]
        return self.mixed(x, found.keys) + found.values


class Attribute(Layer):
    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        if self.makes:
            shared.pair = Pair(self.keys(x), x.sin())
        return self.mixed(x, shared.pair.keys) * shared.pair.values


class MadeObject(Layer):
    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if self.makes:
            shared["made"] = Slotted()
            shared["made"].keys = self.keys(x)
        return self.mixed(x, shared["made"].keys)


class Summed(Layer):
    """Reads and writes in each block; the model uses the sum as well."""

    def forward(self, x: torch.Tensor, shared: Shared) -> torch.Tensor:
        made = self.mixed(x, self.keys(x))
        shared.total = shared.total + made.square().mean()
        shared.seen.append(made.detach().mean())
        return torch.tanh(made) * torch.tanh(shared.total)


class Kept(Layer):
    """What one block was given another uses; the last one hands a new dictionary on."""

    def forward(self, x: torch.Tensor, shared: dict[str, Any]) -> torch.Tensor:
        if self.number == 0:
            shared["first"] = x
        if self.number == 3:
            shared.pop("first")
        return self.mixed(x, shared.get("first", self.keys(x)))


class Net(nn.Module):
    def __init__(self, kind: type[Layer], shared: Callable[[], Any], used: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(kind(n) for n in range(BLOCKS))
        self.shared, self.used = shared, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, x = self.shared(), self.first(x)
        for layer in self.layers:
            if isinstance(layer, ByKeyword):
                (x,) = layer(x, scale=0.5, shared=shared)
            else:
                x = layer(x, shared)
        out: torch.Tensor = x.square().mean() + self.used(shared)
        return out


def nothing(shared: Any) -> float:
    return 0.0


KINDS: dict[str, tuple[type[Layer], Callable[[], Any], Callable[[Any], Any]]] = {
    "dictionary": (Words, dict, nothing),
    "dictionary of a class of its own": (Words, UserDict, nothing),
    "used by the model, too": (Words, dict, lambda shared: shared["keys"].mean()),
    "keyword": (ByKeyword, dict, nothing),
    "object by keyword": (ByKeyword, UserDict, nothing),
    "list": (Appended, list, nothing),
    "deque": (Appended, deque, nothing),
    "nested": (Nested, lambda: {"layers": [], "count": 0}, nothing),
    "attribute": (Attribute, SimpleNamespace, nothing),
    "dataclass": (Attribute, Shared, nothing),
    "object made by a block": (MadeObject, dict, nothing),
    "sum": (Summed, Shared, lambda shared: shared.total + sum(shared.seen)),
    "input of a block": (Kept, dict, nothing),
}


def rows() -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> Trace:
    trace: Trace = {}
    for step in range(3):
        torch.manual_seed(step)
        loss = model(rows())
        loss.backward()
        trace |= {f"{step} {name}": copy_of(p.grad) for name, p in model.named_parameters()}
        trace[f"{step} loss"] = copy_of(loss)
        if step == 1:
            model.zero_grad()
    return trace | {"generator": torch.get_rng_state()}


def streamed(make: Callable[[], nn.Module], budget: int, folder: Path | None) -> Trace:
    torch.manual_seed(0)
    where: dict[str, Any] = {"home": "device"} if folder is None else {"home": "disk", "folder": folder}
    model = ts.stream(make(), device="cpu", budget=budget, machine=DIRECT, **where)
    try:
        return trained(model)
    finally:
        ts.unstream(model)


def at_the_least(make: Callable[[], nn.Module], folder: Path | None) -> Trace:
    budget = 1
    for _ in range(12):
        try:
            return streamed(make, budget, folder)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
    raise AssertionError("each budget named was refused in turn")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize("name", KINDS)
def test_exact(name: str, disk: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected, folder = trained(Net(*KINDS[name])), tmp_path if disk else None
    assert_same(expected, streamed(lambda: Net(*KINDS[name]), 2**30, folder))
    assert_same(expected, at_the_least(lambda: Net(*KINDS[name]), folder))
