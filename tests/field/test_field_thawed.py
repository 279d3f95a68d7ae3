"""Parameters frozen and thawed while training goes on, as people do it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, HOMES, WIDTH, assert_exact, plain, sgd, streamed, trained
from exact import assert_same
from torch import nn

import tapestream as ts

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")

COUNT = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(COUNT)
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def from_the_last(model: Any, optimizer: Any, step: int) -> None:
    """One block more in each step, as in gradual unfreezing."""
    if step == 0:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
    else:
        model.blocks[COUNT - step].requires_grad_(True)


def head_first(model: Any, optimizer: Any, step: int) -> None:
    model.first.requires_grad_(step > 0)
    model.blocks.requires_grad_(step > 0)


def biases_first(model: Any, optimizer: Any, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(step > 0 or name.endswith("bias"))


def frozen_later(model: Any, optimizer: Any, step: int) -> None:
    """From the first block on: what is frozen stays as it is, with its momentum."""
    if step > 0:
        model.blocks[step - 1].requires_grad_(False)


def in_turns(model: Any, optimizer: Any, step: int) -> None:
    for number, block in enumerate(model.blocks):
        block.requires_grad_(number % 2 == step % 2)


def norms_in_evaluation(model: Any, optimizer: Any, step: int) -> None:
    """Frozen as well, and thawed."""
    for block in model.blocks:
        block[1].train(step > 1)
        block[1].requires_grad_(step > 1)


def one_number_wide(model: Any, optimizer: Any, step: int) -> None:
    """Single parameters, by their names."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.requires_grad_((number + step) % 3 != 0)


CHANGES = (from_the_last, head_first, biases_first, frozen_later, in_turns, norms_in_evaluation, one_number_wide)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("change", CHANGES)
def test_exact_within_the_budget(change: Callable[[Any, Any, int], None], tmp_path: Path) -> None:
    """The optimizer was made before anything was frozen."""
    assert_exact(Net, tmp_path, HOMES[CHANGES.index(change) % 2], before=change, steps=4)


@pytest.mark.parametrize("home", HOMES)
def test_an_optimizer_that_is_made_anew(home: str, tmp_path: Path) -> None:
    """Of those that take gradients then, in the middle of training."""

    def run(model: Any, make: Callable[[Any], Any]) -> Any:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        found = trained(model, make(model))
        model.requires_grad_(True)
        return found | {f"then {name}": t for name, t in trained(model, make(model)).items()}

    torch.manual_seed(0)
    expected = run(
        Net(), lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    )
    with streamed(Net, home, tmp_path, AMPLE) as model:
        assert_same(expected, run(model, sgd))


def test_a_model_whose_blocks_are_all_frozen_at_first(tmp_path: Path) -> None:
    """Streamed frozen, with another optimizer than SGD, then thawed: its state begins then."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Net()
        model.blocks.requires_grad_(False)
        if ours:
            ts.stream(model, device="cpu", budget=AMPLE, home="disk", folder=tmp_path)
            optimizer: Any = ts.optimizer(model, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found.append(trained(model, optimizer, before=lambda m, o, step: m.blocks.requires_grad_(step > 0), steps=3))
        if ours:
            ts.unstream(model)
    assert_same(*found)


def test_what_is_never_thawed_is_never_written(tmp_path: Path) -> None:
    expected = plain(Net, before=lambda m, o, k: m.blocks[:2].requires_grad_(False))
    with streamed(Net, "disk", tmp_path, AMPLE) as model:
        before = {name: t.detach().clone() for name, t in model.blocks[:2].named_parameters()}
        assert_same(expected, trained(model, sgd(model), before=lambda m, o, k: m.blocks[:2].requires_grad_(False)))
        assert all(torch.equal(t, before[name]) for name, t in model.blocks[:2].named_parameters())
