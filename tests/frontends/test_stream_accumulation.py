"""Micro-batches: whatever lies where, every one of them stays within the budget, and the sums are plain PyTorch's."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from streamable import Model
from streaming import gradients_of, options_of
from torch import nn

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.models.gpt import GPT, GPTConfig
from tapestream.storage.meter import track_memory

SMALL = 8 * 1024  # counters, scalars and the like


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (2, 64)), torch.randint(0, 256, (2, 64))


CASE = Model(lambda: GPT(GPTConfig(4, 64, 2, vocabulary=256, context=64)), tokens)


def least_for(call: Callable[[], Any]) -> int:
    with pytest.raises(ts.BudgetError) as refused:
        call()
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def start(budget: int, options: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = ts.stream(CASE.model(), budget=budget, **options)
    return model, ts.optimizer(model, torch.optim.SGD, lr=0.0)


def least_of_micro_batches(options: dict[str, Any]) -> int:
    """The least for one backward after another; on the device, where gradients stay, more than for the first alone."""
    model, _ = start(1, options)
    least = least_for(lambda: model(*tokens()))
    ts.unstream(model)
    model, _ = start(least, options)
    model(*tokens()).backward()
    if options["home"] == "device":
        with pytest.raises(ts.BudgetError, match="gradients of an earlier backward lie on the device"):
            model(*tokens())
        needed = least_for(lambda: model(*tokens()))
        assert least < needed
        least = needed
        model.zero_grad()
    model(*tokens()).backward()  # without them, or at home on a slower tier, the first one's least is enough
    ts.unstream(model)
    return least


@pytest.mark.parametrize("home", ["device", "disk"])
def test_every_micro_batch_is_within_the_budget(home: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    options = options_of("auto", tmp_path, home)
    budget = least_of_micro_batches(options)
    batches = [tokens() for _ in range(3)]
    plain = CASE.model()
    for batch in batches:
        plain(*batch).backward()
    if home == "disk":  # what lies outside the blocks makes gradients beside those that are there
        budget += sum(p.nbytes for name, p in plain.named_parameters() if "blocks" not in name)
    model, optimizer = start(budget, options)
    for _ in range(2):
        for batch in batches:
            model(*batch).backward()
        found = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
        gc.collect()
        held = held_nbytes(model)
        with track_memory() as meter:
            for batch in batches:
                model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    ts.unstream(model)
    assert_same(gradients_of(plain), found)
    assert 0.8 * budget <= held + meter.peak_nbytes <= budget + SMALL


def test_gradients_dropped_after_the_forward_are_there_in_it(tmp_path: Path) -> None:
    """The loop of many tutorials: forward, ``zero_grad()``, backward, step."""
    options = options_of("auto", tmp_path, "device")
    model, optimizer = start(least_of_micro_batches(options), options)
    for _ in range(3):
        loss = model(*tokens())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ts.unstream(model)


def test_with_room_for_all_micro_batches_have_the_plan_of_one(tmp_path: Path) -> None:
    model, _ = start(2**30, options_of("auto", tmp_path, "device"))
    forwards = []
    for _ in range(2):
        model(*tokens()).backward()
        forwards.append(ts.report(model).plan.simulation.forwards)
    ts.unstream(model)
    assert forwards == [4, 4]
