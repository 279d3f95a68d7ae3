"""Users who read and write parameters between steps, wherever these live then."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Trace, assert_same, seed
from streamable import MODELS, Chained, Model, numbers
from streaming import LEVELS, budget_at, everything, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError

CASE = MODELS["gpt"]


def in_pairs(*choices: Sequence[str]) -> list[Any]:
    """All combinations; those without which every pair is still there, in the full run alone."""
    least = min(map(len, choices))
    every = product(*map(enumerate, choices))
    return [
        pytest.param(*(name for _, name in one), marks=[pytest.mark.full] * (sum(k for k, _ in one) % least > 0))
        for one in every
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
    """Five steps; after each, weights decay by hand, and an average of them moves on; once all are replaced."""
    seed(3)
    trace: Trace = {}
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(5):
        loss_at(model, CASE).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(0.97)
                p.data[..., 0] += 0.01
                average[name].lerp_(p, 0.1)
        if step == 2:
            model.load_state_dict(saved)
        trace |= everything(model, f"{step} after ")
    return trace | {f"average {name}": t for name, t in average.items()}


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("engine", "level", "update"), in_pairs(["auto", "adversarial"], LEVELS, ["step", "backward"]))
def test_weights_changed_between_steps(engine: str, level: str, update: str, tmp_path: Path) -> None:
    knobs = {"lr": 0.05, "momentum": 0.9}
    options = options_of(engine, tmp_path)
    make = lambda m: ts.optimizer(m, torch.optim.SGD, update=update, master=None, **knobs)  # noqa: E731
    budget = budget_at(level, CASE, make, **options)
    plain = CASE.model()
    expected = train(plain, torch.optim.SGD(plain.parameters(), **knobs))
    with streamed(CASE, budget, **options) as model:
        assert_same(expected, train(model, make(model)))


def replaced(model: nn.Module) -> None:
    """Half of every other parameter, in memory of its own."""
    for p in list(model.parameters())[::2]:
        p.data = p.data * 0.5


def made_again(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another of the same kind."""
    if isinstance(optimizer, ts.optim.streamed.StreamedOptimizer):
        return ts.optimizer(model, torch.optim.SGD, lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.02)


def replacing(model: nn.Module, optimizer: torch.optim.Optimizer, when: str) -> Trace:
    """Two steps after the data of parameters were replaced at a moment when some of them live on the device."""
    seed(3)
    loss_at(model, CASE).backward()
    optimizer.step()
    optimizer.zero_grad()
    hooks: list[Any] = []
    if when == "in a hook":
        hooks = [b.register_forward_hook(lambda module, *_: replaced(module)) for b in model.blocks]
    elif when == "before a dropped forward":
        loss = loss_at(model, CASE)
        replaced(model)
        del loss
    else:
        replaced(model)
    if when != "before an optimizer":
        with torch.no_grad():
            loss_at(model, CASE)
    for hook in hooks:
        hook.remove()
    if when == "before all plans go" and ts.frontends.module.stream.is_streamed(model):
        ts.frontends.module.stream.handle_of(model).replan()
    if when in ("before an optimizer", "before a dropped forward"):
        optimizer = made_again(model, optimizer)
    trace = everything(model, "replaced ")
    for step in range(2):
        loss_at(model, CASE).backward()
        optimizer.step()
        optimizer.zero_grad()
        trace |= everything(model, f"{step} after ")
    return trace


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("engine", "level", "when"),
    in_pairs(
        ["auto", "adversarial", "fake_streams"],
        LEVELS,
        ["before an optimizer", "before a dropped forward", "before all plans go", "in a hook"],
    ),
)
def test_data_replaced_wherever_parameters_live(engine: str, level: str, when: str, tmp_path: Path) -> None:
    options = options_of(engine, tmp_path)
    make = lambda m: ts.optimizer(m, torch.optim.SGD, lr=0.05)  # noqa: E731
    budget = budget_at(level, CASE, make, **options)
    plain = CASE.model()
    expected = replacing(plain, torch.optim.SGD(plain.parameters(), lr=0.05), when)
    with streamed(CASE, budget, **options) as model:
        assert_same(expected, replacing(model, make(model), when))


@pytest.mark.parametrize("level", LEVELS)
def test_data_replaced_between_forward_and_backward_raise(level: str, tmp_path: Path) -> None:
    """Plain PyTorch differentiates by what is there now; what has been moved or is made again cannot."""
    options = options_of("auto", tmp_path)
    make = lambda m: ts.optimizer(m, torch.optim.SGD, lr=0.05)  # noqa: E731
    with streamed(CASE, budget_at(level, CASE, make, **options), **options) as model:
        optimizer = make(model)
        for _ in range(2):
            loss = loss_at(model, CASE)
            replaced(model.blocks)
            with pytest.raises(GradientError, match=r"changed after this forward|data was replaced|in-place operation"):
                loss.backward()
            optimizer.zero_grad()
        loss_at(model, CASE).backward()
        optimizer.step()


def putting_back(model: nn.Module, optimizer: torch.optim.Optimizer, meanwhile: str) -> Trace:
    """Steps between which parameters have other data for a while, and then those that they had before."""
    seed(3)
    trace: Trace = {}
    parameters = list(model.parameters())
    for step in range(3):
        before = [p.data for p in parameters]
        for p in parameters:
            p.data = p.data * 0.5
        if meanwhile == "evaluated":
            with torch.no_grad():
                trace[f"{step} evaluated"] = loss_at(model, CASE)
        else:
            loss_at(model, CASE).backward()
        for p, data in zip(parameters, before, strict=True):
            p.data = data
        if meanwhile == "evaluated":
            loss_at(model, CASE).backward()
        optimizer.step()
        optimizer.zero_grad()
        trace |= everything(model, f"{step} after ")
    return trace


HOMES = [("auto", "disk"), ("adversarial", "disk"), ("fake_streams", "host"), ("auto", "device")]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("meanwhile", ["evaluated", "differentiated"])
@pytest.mark.parametrize("level", ["full", "least"])
@pytest.mark.parametrize(("engine", "home"), HOMES)
def test_data_put_back(engine: str, home: str, level: str, meanwhile: str, tmp_path: Path) -> None:
    """What had been taken from the parameters was their home, which got the other data."""
    options = options_of(engine, tmp_path, home)
    make = lambda m: ts.optimizer(m, torch.optim.SGD, lr=0.05)  # noqa: E731
    budget = budget_at(level, CASE, make, **options)
    plain = CASE.model()
    expected = putting_back(plain, torch.optim.SGD(plain.parameters(), lr=0.05), meanwhile)
    with streamed(CASE, budget, **options) as model:
        assert_same(expected, putting_back(model, make(model), meanwhile))


@pytest.mark.parametrize(("engine", "home"), HOMES)
def test_data_exchanged(engine: str, home: str, tmp_path: Path) -> None:
    """Each gets what the other shows: bytes of their block both."""
    options = options_of(engine, tmp_path, home)
    with streamed(CASE, "1 TiB", **options) as model:
        loss_at(model, CASE).backward()
        one, other = next(
            (a, b) for a in model.parameters() for b in model.parameters() if a is not b and a.shape == b.shape
        )
        wanted = other.detach().clone(), one.detach().clone()
        one.data, other.data = other.data, one.data
        loss_at(model, CASE).backward()
        assert torch.equal(one, wanted[0])
        assert torch.equal(other, wanted[1])


class Frozen(nn.Module):
    """Uses its weight as data, which plain PyTorch would let change between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 64) / 8), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(x), self.weight.data, self.bias) + self.weight.sum() * 0


def test_weights_that_are_read_as_data_and_change_before_backward(tmp_path: Path) -> None:
    """Also where they stay on the device, in a block that is stored."""
    case = Model(lambda: Chained([Frozen() for _ in range(6)]), numbers(1024, 64))
    options = options_of("auto", tmp_path, "device")
    budget = budget_at("half", case, lambda m: None, **options)
    with streamed(case, budget, **options) as model:
        loss = loss_at(model, case)
        with torch.no_grad():
            model.blocks[-1].weight.zero_()
        with pytest.raises(GradientError, match="were changed after this forward"):
            loss.backward()
