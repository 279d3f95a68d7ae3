"""A GPT whose blocks all have the first one's parameters: they exist once, streamed or not."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.models import GPT, GPTConfig
from tapestream.storage.meter import track_memory

CONFIG = GPTConfig(5, 32, 2, vocabulary=17, context=8, shared=True)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def test_parameters_exist_once() -> None:
    model = GPT(CONFIG)
    assert sum(p.numel() for p in model.parameters()) == CONFIG.parameters
    first = GPT(GPTConfig(5, 32, 2, vocabulary=17, context=8)).blocks[0]
    for block in model.blocks:
        for mine, other in zip(block.parameters(), first.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("engine", ["auto", "adversarial"])
def test_streamed_from_disk_it_trains_like_plain_pytorch(engine: str, tmp_path: Path) -> None:
    plain = GPT(CONFIG)
    with torch.device("meta"):
        model = GPT(CONFIG)
    ts.stream(model, device="cpu", budget="600 KiB", folder=tmp_path, engine=engine)
    ours = ts.optimizer(model, torch.optim.SGD, lr=0.1, update="backward")
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        losses = []
        for net, optimizer in ((model, ours), (plain, theirs)):
            loss = net(*batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("halves", [False, True])
def test_sums_over_layers_stay_within_the_least_budget(halves: bool, update: Any, tmp_path: Path) -> None:
    """Each layer's gradients are added to those of the layers behind it: both, and their sums, exist at that time."""
    config = GPTConfig(4, 128, 2, vocabulary=64, context=16, shared=True, halves=halves)

    def start(budget: int) -> tuple[GPT, Any]:
        model = ts.stream(GPT(config), device="cpu", budget=budget, folder=tmp_path)
        return model, ts.optimizer(model, torch.optim.SGD, lr=0.1, update=update)

    def step() -> None:
        model(words, words).backward()
        optimizer.step()
        optimizer.zero_grad()

    words = torch.randint(0, 64, (1, 16))
    model, optimizer = start(2**14)
    with pytest.raises(ts.BudgetError) as refused:
        step()
    least = refused.value.least_nbytes
    assert least is not None
    ts.unstream(model)
    model, optimizer = start(least)
    for _ in range(2):
        step()
    for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
        gc.collect()
        held = held_nbytes(model)
        with track_memory() as meter:
            step()
    ts.unstream(model)
    assert 0.8 * least <= held + meter.peak_nbytes <= least + 8 * 1024
