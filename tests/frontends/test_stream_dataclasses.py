"""Dataclasses that nobody has registered with pytree, as what blocks return and are given."""

import copy
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, copy_of
from streaming import gradients_of, options_of
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.stream import handle_of

WIDTH = 16


@dataclass
class Plain:
    x: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Derived:
    """One field is made from others, and one argument is no field."""

    x: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    scale: InitVar[float] = 1.0
    norm: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.norm = self.x.square().mean() * scale


@dataclass(frozen=True)
class Nested:
    inner: dict[str, Plain]

    @property
    def x(self) -> torch.Tensor:
        return self.inner["it"].x

    @property
    def losses(self) -> list[torch.Tensor]:
        return self.inner["it"].losses


def nested(x: torch.Tensor, losses: Any = ()) -> Nested:
    return Nested({"it": Plain(x, list(losses))})


MAKERS: dict[str, Any] = {
    "plain": Plain, "frozen": Frozen, "slotted": Slotted, "derived": Derived, "nested": nested
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(WIDTH, WIDTH), make

    def forward(self, state: Any) -> Any:
        x = torch.tanh(self.linear(state.x))
        return self.make(x, [*state.losses, x.abs().mean()])


class Net(nn.Module):
    def __init__(self, make: Any, *, returns: bool = False) -> None:
        super().__init__()
        self.before, self.make, self.returns = nn.Linear(WIDTH, WIDTH), make, returns
        self.blocks = nn.ModuleList(Block(make) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        state = self.make(self.before(x))
        for block in self.blocks:
            state = block(state)
            assert type(state) is type(self.make(x))
        return state if self.returns else state.x.square().mean() + torch.stack(state.losses).sum()


def differentiated(model: Net) -> dict[str, Any]:
    model.zero_grad()
    loss = model(torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH))
    if model.returns:
        loss = loss.x.square().mean() + torch.stack(loss.losses).sum()
    loss.backward()
    return gradients_of(model) | {"loss": copy_of(loss)}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_states_that_are_dataclasses(kind: str, home: str, tight: bool, returns: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net(MAKERS[kind], returns=returns)
    model = ts.stream(copy.deepcopy(plain), budget=1 if tight else "1 GiB", **options_of("auto", tmp_path, home))
    if tight:
        with pytest.raises(BudgetError) as least:
            differentiated(model)
        assert least.value.least_nbytes is not None
        handle_of(model).budget = ts.Budget(least.value.least_nbytes)
    for _ in range(2):
        assert_same(differentiated(plain), differentiated(model))
    with torch.no_grad():
        x = torch.ones(2, WIDTH)
        assert isinstance(model(x), type(plain(x)))
    ts.unstream(model)
