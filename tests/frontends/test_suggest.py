"""`ts.plan(..., suggest=True)`: what would help is found, holds when it is followed, and leaves the model as it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tapestream as ts
from tapestream.models import GPT, GPTConfig

CONFIG = GPTConfig(4, 64, 4, vocabulary=8192, context=64)
TOKENS = torch.randint(8192, (4, 64), generator=torch.Generator().manual_seed(0))
LINK = ts.Link(1e9)
MACHINE = ts.Machine({(ts.Tier.DISK, ts.Tier.DEVICE): LINK, (ts.Tier.DEVICE, ts.Tier.DISK): LINK})


def planned(model: torch.nn.Module, budget: str, folder: Path, **more: Any) -> ts.Plan:
    return ts.plan(model, (TOKENS, TOKENS), budget=budget, folder=folder, device="cpu", machine=MACHINE, **more)


def test_what_fits_is_said_where_nothing_does(tmp_path: Path) -> None:
    model = GPT(CONFIG)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ts.BudgetError) as told:
        planned(model, "12MiB", tmp_path)
    assert "It fits with" not in str(told.value)
    with pytest.raises(ts.BudgetError) as told:
        planned(model, "12MiB", tmp_path, suggest=True)
    message = str(told.value)
    assert "It fits with" in message
    assert "stream(..., loss_chunks='auto')" in message
    plan = planned(model, "12MiB", tmp_path, loss_chunks="auto")
    assert plan.peak_nbytes <= 12 * 2**20
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert type(model) is GPT
    assert type(model.head) is torch.nn.Linear


def test_a_streamed_model_is_told_of_updates_in_the_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(GPTConfig(4, 128, 4, vocabulary=256, context=64))
    tokens = TOKENS % 256
    slow = ts.Link(1e6)
    links = ts.Machine({(ts.Tier.DISK, ts.Tier.DEVICE): slow, (ts.Tier.DEVICE, ts.Tier.DISK): slow})
    ts.stream(model, budget="6MiB", folder=tmp_path, device="cpu", machine=links)
    ts.optimizer(model, torch.optim.AdamW, lr=0.1)
    plain = ts.plan(model, (tokens, tokens))
    assert plain.remedies == ()
    plan = ts.plan(model, (tokens, tokens), suggest=True)
    assert plan.schedule == plain.schedule
    (found,) = (one for one in plan.remedies if "update='backward'" in one.change)
    assert found.seconds < found.before_seconds
    assert [one.seconds for one in plan.remedies] == sorted(one.seconds for one in plan.remedies)
    assert f"would help   {found}" in str(plan)
    model(tokens, tokens).backward()  # as before: nothing was updated in it
    assert model.blocks[0].mlp_in.weight.grad is not None
    ts.unstream(model)
    ts.stream(model, budget="6MiB", folder=tmp_path, device="cpu", machine=links)
    ts.optimizer(model, torch.optim.AdamW, lr=0.1, update="backward")
    there = ts.plan(model, (tokens, tokens), suggest=True)
    assert there.seconds < plain.seconds
    assert not any("parts" in one.change for one in there.remedies)  # each would be a step of its own
