"""Users who read and write parameters between steps, wherever these live then."""

from pathlib import Path

import pytest
import torch
from exact import Trace, assert_same, seed
from streamable import MODELS
from streaming import LEVELS, budget_at, everything, loss_at, options_of, streamed
from torch import nn

import tapestream as ts

CASE = MODELS["gpt"]


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


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("engine", ["auto", "adversarial"])
def test_weights_changed_between_steps(engine: str, level: str, update: str, tmp_path: Path) -> None:
    knobs = {"lr": 0.05, "momentum": 0.9}
    options = options_of(engine, tmp_path)
    make = lambda m: ts.optimizer(m, torch.optim.SGD, update=update, master=None, **knobs)  # noqa: E731
    budget = budget_at(level, CASE, make, **options)
    plain = CASE.model()
    expected = train(plain, torch.optim.SGD(plain.parameters(), **knobs))
    with streamed(CASE, budget, **options) as model:
        assert_same(expected, train(model, make(model)))
