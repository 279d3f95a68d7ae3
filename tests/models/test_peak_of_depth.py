"""Memory does not grow with depth: a GPT of 96 blocks under the budget of one of 12."""

import gc
from pathlib import Path

import pytest
import torch

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.models import GPT, GPTConfig

BUDGET = 2_300_000  # bytes; 12 blocks have parameters of 2.4 MB and, stored, a tape of 7 MB


def peak(layers: int, folder: Path) -> int:
    """Most bytes that a step holds: what the model holds between steps, and what is allocated within."""
    links = {(ts.Tier.DEVICE, ts.Tier.DISK): ts.Link(1e9), (ts.Tier.DISK, ts.Tier.DEVICE): ts.Link(1e9)}
    with torch.device("meta"):
        model = GPT(GPTConfig(layers, 64, 2, vocabulary=64, context=64))
    ts.stream(model, device="cpu", budget=BUDGET, folder=folder, machine=ts.Machine(links=links))
    optimizer = ts.optimizer(model, torch.optim.SGD, lr=0.1, update="backward")
    tokens = torch.zeros(2, 64, dtype=torch.long)

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
        gc.collect()
        before = held_nbytes(model)
        with ts.track_memory() as meter:
            step()
    ts.unstream(model)
    return before + meter.peak_nbytes


@pytest.mark.full
def test_the_peak_at_96_blocks_is_that_at_12(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    shallow, deep = peak(12, tmp_path), peak(96, tmp_path)
    assert deep <= BUDGET
    assert 0.98 * shallow <= deep <= 1.02 * shallow
