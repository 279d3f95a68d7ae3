"""One thread, so that the sums of parallel kernels are made in one order; a plain and a streamed model side by side."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import CASE, Pair, sgd
from streaming import budget_at, options_of, streamed
from torch import nn


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """For all tests here."""


@pytest.fixture(params=["adversarial least", "auto full"])
def setting(request: Any, tmp_path: Path) -> dict[str, Any]:
    engine, level = request.param.split()
    options = options_of(engine, tmp_path / "home")
    return options | {"budget": budget_at(level, CASE, sgd, **options)}


@pytest.fixture
def pair(setting: dict[str, Any]) -> Iterator[Pair]:
    """A plain model and a streamed one, and an optimizer for each."""
    theirs = CASE.model()
    with streamed(CASE, **setting) as ours:
        yield theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)


@pytest.fixture(params=["adversarial", "auto"])
def crowd(request: Any, tmp_path: Path) -> Iterator[Pair]:
    """The same with room for several live calls, each of which recomputes."""
    options = options_of(request.param, tmp_path / "home")
    room = 4 * budget_at("full", CASE, sgd, **options)
    theirs = CASE.model()
    with streamed(CASE, room, planner="bisection", **options) as ours:
        yield theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[nn.Module]:
    """A streamed model that is updated within its backward."""
    options = options_of("adversarial", tmp_path)
    with streamed(CASE, budget_at("least", CASE, lambda m: sgd(m, "backward"), **options), **options) as ours:
        sgd(ours, "backward")
        yield ours
