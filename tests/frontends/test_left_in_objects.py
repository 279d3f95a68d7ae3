"""Tensors with a gradient that blocks leave in objects, for later blocks or the loss to find: with every planner,
budget and home, at the first call and later, gradients are plain PyTorch's or a GradientError names the block."""

import contextlib
import copy
import itertools
from collections import UserDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import PLANNERS, Trace, assert_same, copy_of
from streaming import DIRECT, gradients_of
from thinned import one_in
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError

FACTORS = (1.0, 1.03, 1.05, 1.2, None)
"""Times the least budget; None: ample."""

WIDTH = 16


@dataclass
class Store:
    """What the blocks of one call share. ``total``: a sum that every block adds to; ``steps``: written into."""

    total: Any = 0.0
    kept: list[torch.Tensor] = field(default_factory=list)
    queue: deque[torch.Tensor] = field(default_factory=deque)
    words: "UserDict[str, torch.Tensor]" = field(default_factory=UserDict)
    steps: torch.Tensor = field(default_factory=lambda: torch.zeros(WIDTH))


class Block(nn.Module):
    """Puts something into the store (the first), or takes it from there (the third)."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.linear, self.number, self.kind = nn.Linear(WIDTH, WIDTH), number, kind

    def forward(self, x: torch.Tensor, store: Store) -> torch.Tensor:
        made = torch.tanh(self.linear(x))
        if self.kind == "sum":
            store.total = store.total + made.square().mean()
        elif self.kind == "gate":
            store.total = store.total + self.linear.bias.sum()  # saves nothing, and no state leads to it
        elif self.number == 0:
            self.keep(made, store)
        elif self.number == 2 and self.kind != "unused":
            made = made + self.found(store)
        if self.kind == "written":
            store.steps += made.detach().mean(0)
        return made

    def keep(self, made: torch.Tensor, store: Store) -> None:
        if self.kind == "words":
            store.words["kept"] = made * 2
        elif self.kind == "queue":
            store.queue.append(made * 2)
        elif self.kind == "attribute":
            self.made = made * 2
        else:
            store.kept.append(made * 2)

    def found(self, store: Store) -> torch.Tensor:
        if self.kind == "attribute":
            found: torch.Tensor = self.first[0].made
            return found
        if self.kind == "queue":
            return store.queue[0]
        return store.words["kept"] if self.kind == "words" else store.kept[0]


class Net(nn.Module):
    """``deep``: the blocks' input requires a gradient. ``frozen``: of the block that finds something."""

    def __init__(self, kind: str, *, deep: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH) if deep else nn.Identity()
        self.blocks = nn.ModuleList(Block(number, kind) for number in range(4))
        for block in self.blocks:
            block.__dict__["first"] = [self.blocks[0]]
        if frozen:
            for block in self.blocks[:3]:
                block.requires_grad_(False)
            self.blocks[0].linear.bias.requires_grad_(True)
        self.kind, self.cut = kind, frozen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        store, x = Store(), self.before(x)
        for number, block in enumerate(self.blocks):
            x = block(x.detach() if self.cut and number == 1 else x, store)
        loss: torch.Tensor = x.square().mean() + store.total
        return loss + sum((t.square().mean() for t in store.kept), torch.zeros(())) if self.kind == "unused" else loss


KINDS = ("list", "words", "queue", "attribute", "sum", "gate", "unused", "written")


def rows() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def differentiated(model: nn.Module) -> Trace:
    model.zero_grad()
    loss = model(rows())
    loss.backward()
    return gradients_of(model) | {"loss": copy_of(loss)}


@contextlib.contextmanager
def streamed(model: Net, budget: int, options: dict[str, Any]) -> Iterator[nn.Module]:
    ours = ts.stream(copy.deepcopy(model), device="cpu", budget=budget, **options)
    try:
        yield ours
    finally:
        ts.unstream(ours)


def least(model: Net, options: dict[str, Any]) -> int:
    try:
        with streamed(model, 1, options) as ours:
            ours(rows())
    except BudgetError as refused:
        assert refused.least_nbytes is not None  # noqa: PT017
        return refused.least_nbytes
    raise AssertionError("a budget of one byte did not raise BudgetError")


def check(model: Net, planner: str, factor: float | None, folder: Path | None) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"planner": planner, "machine": DIRECT}
    options |= {"home": "device"} if folder is None else {"folder": folder}
    plain = copy.deepcopy(model)
    try:
        budget = 2**30 if factor is None else int(factor * least(model, options))
        with streamed(model, budget, options) as ours:
            for _ in range(2):  # the first call profiles
                assert_same(differentiated(plain), differentiated(ours))
    except GradientError as error:
        assert "stage " in str(error) or "blocks." in str(error)  # noqa: PT017


def pairs(shift: int) -> list[tuple[str, float | None]]:
    return [(PLANNERS[(number + shift) % len(PLANNERS)], factor) for number, factor in enumerate(FACTORS)]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("kind", "disk", "deep"), one_in(3, itertools.product(KINDS, [True, False], [True, False])))
def test_exact_or_refused(kind: str, disk: bool, deep: bool, tmp_path: Path) -> None:
    for planner, factor in pairs(KINDS.index(kind) + 2 * disk + 3 * deep):
        check(Net(kind, deep=deep), planner, factor, tmp_path if disk else None)


@pytest.mark.full
@pytest.mark.parametrize("deep", [True, False], ids=["deep", "first"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_full_product(kind: str, disk: bool, deep: bool, tmp_path: Path) -> None:
    for planner, factor in itertools.product(PLANNERS, FACTORS):
        check(Net(kind, deep=deep), planner, factor, tmp_path if disk else None)


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "device"])
def test_what_a_frozen_block_finds(disk: bool, tmp_path: Path) -> None:
    """Its output requires a gradient for that reason alone, and it was no part of the graph."""
    for planner, factor in pairs(4 * disk):
        check(Net("list", deep=False, frozen=True), planner, factor, tmp_path if disk else None)


@pytest.mark.parametrize("kind", ["list", "sum", "written"])
def test_all_in_one_memory_with_room_is_plain(kind: str) -> None:
    """Nothing is recomputed or moved: blocks are nodes of the user's own graph."""
    torch.manual_seed(0)
    plain = Net(kind)
    with streamed(plain, 2**30, {"home": "device", "machine": DIRECT}) as ours:
        for _ in range(2):
            assert_same(differentiated(plain), differentiated(ours))
