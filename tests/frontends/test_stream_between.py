"""What happens between a forward and its backward, and exceptions."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from pairs import CASE, Pair, both, sgd
from streamable import WIDTH, Chained, Dense, Model, numbers
from streaming import budget_at, everything, loss_at, options_of, streamed
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.storage.meter import track_memory

# ------------------------------------------------------------------------------------- between forward and backward


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_between_and_within_steps(pair: Pair, guard: Any) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss = loss_at(model, CASE)
        model.eval()
        with guard():
            value = float(model(torch.ones(3, WIDTH)).sum())
        model.train()
        (loss * value).backward()
        with guard():
            loss_at(model, CASE)

    both(pair, run)


def test_weights_changed_between_forward_and_backward_raise(pair: Pair) -> None:
    model = pair[1]
    loss = loss_at(model, CASE)
    with torch.no_grad():
        model.blocks[2].linear.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed after this forward|modified by an inplace|in-place operation"):
        loss.backward()


def test_a_step_between_forward_and_backward_raises(crowd: Pair) -> None:
    model, optimizer = crowd[1], crowd[3]
    loss_at(model, CASE).backward()
    loss = loss_at(model, CASE)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed after this forward|modified by an inplace|in-place operation"):
        loss.backward()
    model.zero_grad()
    loss_at(model, CASE).backward()


def test_a_new_optimizer_between_forward_and_backward_is_refused(pair: Pair) -> None:
    loss = loss_at(pair[1], CASE)
    with pytest.raises(InputError, match="between a forward and its backward"):
        sgd(pair[1])
    loss.backward()
    pair[3].step()


def test_a_result_that_is_dropped_leaves_nothing(pair: Pair) -> None:
    ours, optimizer = pair[1], pair[3]

    def step() -> None:
        loss_at(ours, CASE).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    with track_memory() as meter:
        loss_at(ours, CASE)
        ours.zero_grad()
    assert abs(meter.end_nbytes) < 64, "a dropped forward left memory behind"


def test_dropped_forwards_change_nothing(crowd: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE)
        loss = loss_at(model, CASE)
        loss = loss_at(model, CASE)
        loss.backward()

    both(crowd, run)


# ------------------------------------------------------------------------------------------------------- exceptions


class Fused(Dense):
    """Raises in the given run."""

    fuse = 10**9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Fused.fuse -= 1
        if Fused.fuse < 0:
            raise ValueError("burnt")
        return super().forward(x)


def failing(place: str, model: nn.Module) -> None:
    """One step that ends in an exception at ``place``."""
    if place in ("forward", "recompute"):
        Fused.fuse = 0 if place == "forward" else 1
    handle = None
    if place == "gradient hook":
        handle = model.blocks[4].linear.weight.register_hook(lambda g: 1 / 0)
    if place == "outside":  # when the gradients of all blocks have come
        handle = model.before.weight.register_hook(lambda g: 1 / 0)
    if place == "forward hook":
        handle = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises((ValueError, ZeroDivisionError)):  # noqa: PT012
            loss = loss_at(model, FUSED)
            if place == "head":
                loss.register_hook(lambda g: 1 / 0)
            loss.backward()
    finally:
        Fused.fuse = 10**9
        if handle is not None:
            handle.remove()


FUSED = Model(
    lambda: Chained([Fused() if k == 3 else Dense() for k in range(6)], nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH)
)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("place", ["forward", "recompute", "gradient hook", "forward hook", "head", "outside"])
@pytest.mark.parametrize("level", ["least", "half"])
def test_after_an_exception_the_next_step_is_exact(place: str, level: str, tmp_path: Path) -> None:
    options = options_of("adversarial", tmp_path) | {"planner": "bisection"}  # recomputes, whatever the budget
    budget = budget_at(level, FUSED, sgd, **options)
    theirs = FUSED.model()
    with streamed(FUSED, budget, **options) as ours:
        optimizer = sgd(ours)
        pair = theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), optimizer
        both(pair, lambda model, _: loss_at(model, FUSED).backward(), steps=1)
        failing(place, ours)
        handle = handle_of(ours)
        ours.zero_grad()
        assert place == "outside" or not handle.store.copies.tickets  # nobody tells us: the next call will see
        assert place == "outside" or not handle.store.gradients.fresh
        assert_same(everything(theirs), everything(ours))
        both(pair, lambda model, _: loss_at(model, FUSED).backward(), steps=2)
