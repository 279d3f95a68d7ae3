"""Measured peaks against simulated ones."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from streamable import Model
from streaming import budget_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.frontends.module.stream import handle_of
from tapestream.models.gpt import GPT, GPTConfig
from tapestream.storage.meter import track_memory


def make() -> GPT:
    return GPT(GPTConfig(6, 128, 4, vocabulary=256, context=64))


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 256, (4, 64)), torch.randint(0, 256, (4, 64))


CASE = Model(make, tokens)


def before_nbytes(model: nn.Module) -> int:
    """Bytes that the model holds on the device between steps."""
    handle = handle_of(model)
    gradients = sum(p.nbytes for p in handle.outside_parameters() if p.requires_grad)  # none after zero_grad
    return handle.pool.held_nbytes(ts.Tier.DEVICE) + outside_nbytes(handle) - gradients


def check(case: Model, budget: int | str, update: str, **options: Any) -> None:
    """The measured peak of a step is what was simulated, and 5% more at most."""
    torch.set_num_threads(1)
    with streamed(case, budget, **options) as model:
        optimizer: Any = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=update)
        model(*case.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
            batch = case.batch()
            gc.collect()
            before = before_nbytes(model)
            with track_memory() as meter:
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        simulated = ts.report(model).plan.peak_nbytes
        measured = before + meter.peak_nbytes
        assert 0.8 * simulated <= measured <= 1.05 * simulated


SETTINGS = [
    ("9 MiB", "step"), ("9 MiB", "backward"), ("14 MiB", "step"), ("14 MiB", "backward"),
    ("24 MiB", "step"), ("24 MiB", "backward"),
]  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("budget", "update"), SETTINGS)
def test_a_step_takes_what_was_simulated(budget: str, update: str, tmp_path: Path) -> None:
    check(CASE, budget, update, **options_of("auto", tmp_path))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_states_that_move_make_room(update: str, tmp_path: Path) -> None:
    """Deep and narrow: all states together are more than a third of what a step takes with them at hand."""
    deep = Model(
        lambda: GPT(GPTConfig(16, 64, 2, vocabulary=64, context=64)),
        lambda: (torch.randint(0, 64, (32, 64)), torch.randint(0, 64, (32, 64))),
    )
    options = options_of("auto", tmp_path) | {"planner": "offload"}

    def adamw(model: nn.Module) -> Any:
        return ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=update)

    budgets = [budget_at("least", deep, adamw, **options | {"planner": planner}) for planner in ("offload", "periodic")]
    assert budgets[0] < budgets[1] - 2**21  # of 8 MiB of states
    check(deep, budgets[0], update, **options)
