"""Layers that share their parameters stay within the least budget."""

from pathlib import Path
from typing import Any

import pytest
import torch
from least import SMALL, least_and_measured

import tapestream as ts
from tapestream.models import GPT, GPTConfig


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("halves", [False, True])
def test_sums_over_layers_stay_within_the_least_budget(halves: bool, update: Any, tmp_path: Path) -> None:
    """Each layer's gradients are added to those of the layers behind it: both, and their sums, exist at that time."""
    config = GPTConfig(4, 128, 2, vocabulary=64, context=16, shared=True, halves=halves)
    words = torch.randint(0, 64, (1, 16))

    def start(budget: int) -> tuple[Any, Any]:
        model = ts.stream(GPT(config), device="cpu", budget=budget, folder=tmp_path)
        return model, ts.optimizer(model, torch.optim.SGD, lr=0.1, update=update)

    least, measured = least_and_measured(start, lambda model: model(words, words).backward(), 2**14)
    assert 0.8 * least <= measured <= least + SMALL
