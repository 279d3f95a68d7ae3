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


class Headed(torch.nn.Module):
    """Which does not say what its head is."""

    def __init__(self, vocabulary: int = 4096) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Wide() for _ in range(6))
        self.out = torch.nn.Linear(64, vocabulary)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.out(x).flatten(0, -2), y.flatten())


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def examples(samples: int, vocabulary: int = 4096) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 16, 64), torch.randint(0, vocabulary, (samples, 16))


@pytest.mark.parametrize("budget", ["4600KiB", "5000KiB", "5500KiB", "6MiB"])
def test_parts_that_are_said_to_fit_do(budget: str) -> None:
    """The second beside the gradients of the first."""
    model, (x, y) = Headed(8), examples(64, 8)
    ts.stream(model, budget=budget, device="cpu", machine=MACHINE)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3)
    try:
        remedies = ts.plan(model, (x, y), suggest=True).remedies
        said = [one.change for one in remedies]
    except ts.BudgetError as error:
        said = [part for part in str(error).split("with ") if part.startswith("the batch in")]
    for change in said:
        parts = int(change.split()[3])
        for one, other in zip(x.chunk(parts), y.chunk(parts), strict=True):
            model(one, other).backward()
        optimizer.step()
        optimizer.zero_grad()
    ts.unstream(model)


def test_nothing_helps_where_nothing_is_lost() -> None:
    model, batch = Headed(8), examples(8, 8)
    ts.stream(model, budget="1GiB", device="cpu", machine=MACHINE)
    ts.optimizer(model, torch.optim.SGD, lr=0.1)
    assert not any("backward" in one.change for one in ts.plan(model, batch, suggest=True).remedies)
    with pytest.raises(ts.InputError, match="budget= has no effect"):
        ts.plan(model, batch, budget="1MiB", suggest=True)


def test_a_head_that_is_not_said_is_named() -> None:
    batch = examples(16)
    with pytest.raises(ts.BudgetError) as told:
        ts.plan(Headed(), batch, budget="9MiB", device="cpu", machine=MACHINE, suggest=True)
    assert "head='name.of.that.layer'" in str(told.value)
    assert "with stream(..., loss_chunks='auto', head='out'): " in str(told.value)
    plan = ts.plan(Headed(), batch, budget="9MiB", device="cpu", machine=MACHINE, loss_chunks="auto", head="out")
    assert plan.peak_nbytes <= 9 * 2**20


def test_where_the_longest_call_is_refused_its_remedies_are_said() -> None:
    short, long = examples(8, 8), examples(512, 8)
    with pytest.raises(ts.BudgetError) as told:
        ts.plan(Headed(8), short, longest=long, budget="12MiB", device="cpu", machine=MACHINE, suggest=True)
    assert "the longest call" in str(told.value)
    for part in str(told.value).split("It fits with ")[1:]:
        parts = int(part.split()[3])
        first = tuple(t[: len(t) // parts] for t in long)
        assert ts.plan(Headed(8), first, budget="12MiB", device="cpu", machine=MACHINE).peak_nbytes <= 12 * 2**20


def test_a_streamed_model_is_told_of_updates_in_the_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(GPTConfig(4, 128, 4, vocabulary=256, context=64))
    tokens = TOKENS % 256
    slow = ts.Link(1e5)  # so that what is measured beside it hardly counts
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
