"""A step that is skipped: calls of a streamed model whose backward never comes give way to later ones."""

import contextlib
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from place import DEVICE
from streaming import options_of
from things_kept import alive, whole_peak
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.planning.exceeded import limit_of

WIDTH = 64


@functools.cache
def batches(rows: int = 64) -> list[torch.Tensor]:
    return [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(k)).to(DEVICE) for k in range(5)]


class Headed(nn.Module):
    """Blocks between an embedding of a kind and a head that is wider than they are, which makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
        self.head = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).relu()
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(x), 1).square().mean()


def bare() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)])


MODELS = {"bare": bare, "headed": Headed}
HOMES = ["device", "disk"]


def net(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]().to(DEVICE)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out = model(batch)
    return out if out.dim() == 0 else out.square().mean()


@contextlib.contextmanager
def streamed(kind: str, budget: int, home: str, folder: Path, update: str) -> Iterator[tuple[nn.Module, Any]]:
    options = options_of("auto", folder if home == "disk" else None, home)
    model = ts.stream(net(kind), budget=budget, **options)
    try:
        yield model, ts.optimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9, update=update)
    finally:
        ts.unstream(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, skipped: int | None = None, rows: int = 64) -> None:
    """As many people write it: the loss of a step that is skipped has its name until the next one is there."""
    for k, batch in enumerate(batches(rows)):
        loss = loss_of(model, batch)
        if k == skipped:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone().cpu() for p in model.parameters()]


def plain(kind: str, skipped: int | None) -> list[torch.Tensor]:
    model = net(kind)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), skipped)
    return weights(model)


def least(kind: str, home: str, folder: Path, update: str, rows: int = 64) -> int:
    """The least budget in which a run without a skipped step works."""
    budget = 1
    for _ in range(8):
        try:
            with streamed(kind, budget, home, folder, update) as (model, optimizer):
                train(model, optimizer, rows=rows)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
        else:
            return budget
    raise AssertionError("each least was refused in turn")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("room", [1.0, 1.1, 4.0])
def test_a_skipped_step_changes_nothing(kind: str, home: str, update: str, room: float, tmp_path: Path) -> None:
    budget = int(room * least(kind, home, tmp_path, update))
    with streamed(kind, budget, home, tmp_path, update) as (model, optimizer):
        try:
            train(model, optimizer, skipped=2)
        except BudgetError as error:  # what the old loss holds does not fit, or a graph of plain PyTorch
            assert room < 4
            assert kind == "headed" or (home == "device" and room > 1)
            assert "del loss" in str(error)  # noqa: PT017
            return
        assert all(map(torch.equal, weights(model), plain(kind, 2)))


@pytest.mark.on_cpu("bytes of the CPU are measured")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", MODELS)
def test_it_stays_within_the_budget(kind: str, home: str, tmp_path: Path) -> None:
    budget = int((1.0 if kind == "bare" else 1.1) * least(kind, home, tmp_path, "step"))
    gc.collect()
    base = alive()
    with streamed(kind, budget, home, tmp_path, "step") as (model, optimizer):
        train(model, optimizer)
        assert whole_peak(lambda: train(model, optimizer, skipped=2), base) <= limit_of(budget)


@pytest.mark.parametrize("home", HOMES)
def test_a_backward_that_comes_after_all_says_why(home: str, tmp_path: Path) -> None:
    budget = least("bare", home, tmp_path, "step")
    with streamed("bare", budget, home, tmp_path, "step") as (model, optimizer):
        train(model, optimizer)
        before = weights(model)
        first, second = (loss_of(model, batch) for batch in batches()[:2])
        with pytest.raises(BudgetError, match=r"gave way to a later one.*del loss.*or allow"):
            (first + second).backward()
        assert all(p.grad is None for p in model.parameters())
        assert all(map(torch.equal, before, weights(model)))
        del first, second
        train(model, optimizer)  # goes on


@pytest.mark.parametrize("home", HOMES)
def test_a_loss_that_stays_is_named_before_its_bytes_are_too_many(home: str, tmp_path: Path) -> None:
    budget = int((1.15 if home == "disk" else 1.0) * least("bare", home, tmp_path, "step", 256))
    with streamed("bare", budget, home, tmp_path, "step") as (model, optimizer):
        train(model, optimizer, rows=256)
        held = [loss_of(model, batch) for batch in batches(256)[:2]]
        with pytest.raises(BudgetError, match=r"still held.*del loss"):
            held[1].backward()
        del held
        optimizer.zero_grad()
        train(model, optimizer, rows=256)


@pytest.mark.parametrize("home", HOMES)
def test_no_weight_changes_where_an_update_would_come_too_early(home: str, tmp_path: Path) -> None:
    """With update='backward', a sum of two calls: the second one's backward comes first, and updates."""
    with streamed("bare", 1 << 24, home, tmp_path, "backward") as (model, optimizer):
        train(model, optimizer)
        before = weights(model)
        both = sum(loss_of(model, batch) for batch in batches()[:2])
        with pytest.raises(GradientError, match=r"second forward.*update='backward'.*use update='step'"):
            both.backward()
        assert all(map(torch.equal, before, weights(model)))
        del both
        train(model, optimizer)
