"""Training on micro-batches, by plain PyTorch's loop and by `accumulate`, and comparing every bit."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exact import Trace, assert_same, copy_of, seed
from place import DEVICE
from streamable import Model, loss_of
from streaming import options_of, state_of, stepped
from torch import nn

import tapestream as ts
from tapestream.frontends.module.accumulating.joint_costs import planned_together
from tapestream.frontends.module.stream import handle_of

FASTER = "tapestream.frontends.module.accumulating.accumulate.joint_seconds"
"""What the plan is asked for."""


@contextlib.contextmanager
def always_faster() -> Iterator[None]:
    """Inside, plans for all micro-batches together seem to take no time."""
    with patch(FASTER, lambda together: 0.0):
        yield


def said(model: nn.Module) -> str:
    """In which order the last micro-batches went."""
    found = ts.report(model).accumulation
    assert found is not None
    return found


def mean_loss(result: Any, micro_batch: Any) -> torch.Tensor:
    return loss_of(result)


def one_by_one(model: nn.Module, micro_batches: list[Any], loss: Callable[[Any, Any], torch.Tensor]) -> Any:
    """What `accumulate` stands for."""
    losses = []
    for one in micro_batches:
        found = loss(model(*one), one)
        found.backward()
        losses.append(found.detach())
    return losses


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    case: Model,
    accumulate: Callable[..., Any],
    *,
    steps: int = 3,
    count: int = 3,
    gradients: bool = True,
    loss: Callable[[Any, Any], torch.Tensor] = mean_loss,
) -> Trace:
    """Everything that ``steps`` steps of ``count`` micro-batches leave behind, by name."""
    seed(3)
    trace: Trace = {}
    for step in range(steps):
        given = [tuple(t.to(DEVICE) for t in case.batch()) for _ in range(count)]
        with torch.autocast(DEVICE, torch.bfloat16) if case.autocast else contextlib.nullcontext():
            losses = accumulate(model, given, loss)
        trace |= {f"{step}.{micro} loss": copy_of(one) for micro, one in enumerate(losses)}
        trace |= stepped(model, optimizer, step, gradients=gradients)
    return trace | {"torch": torch.get_rng_state()} | state_of(optimizer)


def expected(case: Model, **options: Any) -> Trace:
    """The same of plain PyTorch."""
    plain = case.model().to(DEVICE)
    trainable = [p for p in plain.parameters() if p.requires_grad]
    return train(plain, torch.optim.SGD(trainable, lr=0.05, momentum=0.9), case, one_by_one, **options)


def prepared(model: nn.Module, update: str = "step") -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)


def least_for_accumulating(case: Model, options: dict[str, Any], update: str = "step", *, count: int = 3) -> int:
    """The least budget within which micro-batches go together, if they can."""
    model = ts.stream(case.model(), budget="1 GiB", **options)
    try:
        handle, optimizer = handle_of(model), prepared(model, update)
        with always_faster():
            train(model, optimizer, case, ts.accumulate, count=count, gradients=False)
        kind = next(iter(handle.accumulation.kinds.values()), None)
        if kind is None:
            return 2**30
        handle.budget = ts.Budget(1)
        with pytest.raises(ts.BudgetError) as refused:
            planned_together(handle, kind.found, count, kind.apart_nbytes)
        assert refused.value.least_nbytes is not None
        return refused.value.least_nbytes
    finally:
        ts.unstream(model)


def check(
    case: Model, folder: Path, *, engine: str = "auto", home: str = "disk", budget: int | str = "1 GiB",
    update: str = "step", planner: str = "auto", **options: Any,
) -> str:  # fmt: skip
    """Train by both and compare; returns what `report` says of the last step."""
    wanted = expected(case, gradients=update == "step", **options)
    model = ts.stream(case.model(), budget=budget, planner=planner, **options_of(engine, folder, home))
    try:
        optimizer = prepared(model, update)
        found = train(model, optimizer, case, ts.accumulate, gradients=update == "step", **options)
        order = said(model)
    finally:
        ts.unstream(model)
    assert_same(wanted, found)
    return order
