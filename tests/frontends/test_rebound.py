"""Blocks that put a parameter under another name for the time of their call, and set it to the memory that it has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE
from streaming import options_of
from torch import nn
from torch.nn.utils import parametrize

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError

WIDTH = 16


class Adapted(nn.Module):
    def __init__(self, delta: torch.Tensor, *, times: bool) -> None:
        super().__init__()
        self.delta, self.times = delta, times

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + self.delta) if self.times else weight + self.delta


class Block(nn.Module):
    def __init__(self, how: str, *, frozen: bool) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen), how
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner, delta = self.inner, self.up @ self.down
        if self.how in ("set", "elsewhere"):
            with torch.no_grad():
                inner.weight.set_(inner.weight.detach() if self.how == "set" else inner.weight * 0.5)
            return torch.tanh(inner(x)) * delta.sum()
        if self.how == "swapped":
            weight = inner.weight
            del inner._parameters["weight"]
            inner.weight = weight + delta  # type: ignore[assignment]
            try:
                return torch.tanh(inner(x))
            finally:
                del inner.weight
                inner.weight = weight
        if self.how == "functional":
            found: torch.Tensor = torch.func.functional_call(inner, {"weight": inner.weight + delta}, (x,))
            return torch.tanh(found)
        parametrize.register_parametrization(inner, "weight", Adapted(delta, times=self.how == "times"))
        try:
            if self.how == "cached":
                with parametrize.cached():
                    return torch.tanh(inner(x)) + inner(x)
            return torch.tanh(inner(x))
        finally:
            parametrize.remove_parametrizations(inner, "weight", leave_parametrized=False)


def made(how: str, frozen: bool) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[Block(how, frozen=frozen) for _ in range(4)]).to(DEVICE)


def trained(model: nn.Module, optimizer: Any, call: Any = None) -> dict[str, torch.Tensor]:
    for k in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)).to(DEVICE)
        (call or model)(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def by_hand(how: str, frozen: bool) -> dict[str, torch.Tensor]:
    model = made(how, frozen)
    return trained(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


HOWS = ("plus", "times", "cached", "functional", "swapped", "set")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("home", ["disk", "device"])
def test_a_streamed_model(how: str, frozen: bool, home: str, tmp_path: Path) -> None:
    want, budget = by_hand(how, frozen), 1
    for _ in range(6):
        model = ts.stream(made(how, frozen), budget=budget, **options_of("auto", tmp_path, home))
        try:
            found = trained(model, ts.optimizer(model, torch.optim.SGD, lr=0.1))
            break
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
        finally:
            ts.unstream(model)
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_a_chain(how: str, frozen: bool) -> None:
    model = made(how, frozen)
    chain = ts.Chain(list(model), budget="1 MiB", planner="revolve", verify=True)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found, want = trained(model, optimizer, chain), by_hand(how, frozen)
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("frozen", [True, False])
def test_other_memory_is_refused(frozen: bool, tmp_path: Path) -> None:
    model = ts.stream(made("elsewhere", frozen), budget="1 MiB", **options_of("auto", tmp_path))
    with pytest.raises(GradientError, match="changed"):
        trained(model, ts.optimizer(model, torch.optim.SGD, lr=0.1))
    ts.unstream(model)


def test_other_parameters_for_a_call_are_refused(tmp_path: Path) -> None:
    model = ts.stream(made("plus", True), budget="1 MiB", **options_of("auto", tmp_path))
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    x = torch.ones(4, WIDTH, device=DEVICE)
    with pytest.raises(InputError, match="functional_call"):
        torch.func.functional_call(model, others, (x,))
    model(x).sum().backward()
    ts.unstream(model)
