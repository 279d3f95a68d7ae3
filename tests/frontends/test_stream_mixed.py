"""Blocks that mix frozen and trained parameters: the frozen ones are read, and neither written nor given gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from streamable import Chained, Model, numbers
from streaming import D, H, K, assert_exact, budget_at, gradients_of, loss_at, options_of, state_of, streamed, train
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Offload, Value

WIDE, RANK = 64, 4


class Adapted(nn.Module):
    """A frozen linear map between the two halves of a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDE, RANK, bias=False)
        self.base = nn.Linear(WIDE, WIDE)
        self.up = nn.Linear(RANK, WIDE, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


CASE = Model(lambda: Chained([Adapted() for _ in range(4)]), numbers(3, WIDE))
ADAPTER = 4096  # bytes: two matrices of 1024
BASE = (WIDE + 1) * WIDE * 4 // 4096 * 4096 + 4096


def adamw(model: nn.Module, update: str = "step") -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return ts.optimizer(model, torch.optim.AdamW, groups=[{"params": trained}], lr=0.01, update=update, master=None)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("level", ["least", "half"])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(
    ("engine", "home"), [("adversarial", "disk"), ("auto", "disk"), ("fake_streams", "host"), ("fake_streams", "disk")]
)
def test_trained_like_plain(engine: str, home: str, update: str, level: str, tmp_path: Path) -> None:
    found = options_of(engine, tmp_path, home) | {"planner": "periodic"}
    budget = budget_at(level, CASE, lambda m: adamw(m, update), **found)
    for micro_batches in (1, 2) if update == "step" else (1,):
        assert_exact(
            CASE,
            budget,
            make=torch.optim.AdamW,
            knobs={"lr": 0.01},
            update=update,
            micro_batches=micro_batches,
            **found,
        )


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("engine", "home", "into"), [("auto", "disk", K), ("fake_streams", "host", H)])
def test_what_is_written_back_is_what_was_trained(
    engine: str, home: str, into: Any, update: str, tmp_path: Path
) -> None:
    found = options_of(engine, tmp_path, home) | {"planner": "store_all"}
    with streamed(CASE, budget_at("least", CASE, lambda m: adamw(m, update), **found), **found) as model:
        optimizer, handle = adamw(model, update), handle_of(model)
        for _ in range(2):
            handle.homes.statistics_since()
            loss_at(model, CASE).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved, _ = handle.homes.statistics_since()
        plan = ts.report(model).plan
        cost = plan.profile.blocks[0]
        assert (cost.parameters_nbytes, cost.gradient_nbytes, cost.buffers_nbytes) == (ADAPTER, ADAPTER, BASE)
        assert moved == plan.simulation.bytes_moved
        assert not any(isinstance(a, Offload) and a.value.kind is Kind.BUFFERS for a in plan.schedule)
        each = ADAPTER + cost.optimizer_state_nbytes + (ADAPTER if update == "step" else 0)
        spared = ADAPTER if update == "step" else 0  # the last gradient may stay for the step
        assert 4 * each - spared <= moved[D, into] <= 4 * each
        assert moved[into, D] >= 2 * 4 * BASE - BASE  # forward and backward read it; once it may just be there


def test_frozen_weights_that_users_change_are_the_ones_used(tmp_path: Path) -> None:
    theirs, found = CASE.model(), options_of("adversarial", tmp_path) | {"planner": "store_all"}
    plain = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.01)
    with streamed(CASE, budget_at("half", CASE, adamw, **found), **found) as ours:
        optimizer, seen = adamw(ours), []
        for model, rule in ((theirs, plain), (ours, optimizer)):
            seed(5)
            for step in range(3):
                loss_at(model, CASE).backward()
                with torch.no_grad():  # between backward and step, and between steps
                    model.blocks[1].base.weight.mul_(0.9)
                rule.step()
                rule.zero_grad()
                model.blocks[2].base.bias.data = torch.full((WIDE,), float(step))
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()} | state_of(rule))
    assert_same(*seen)


@pytest.mark.parametrize(("engine", "home"), [("adversarial", "disk"), ("fake_streams", "host"), ("auto", "device")])
def test_thawed_parameters_are_trained_from_then_on(engine: str, home: str, tmp_path: Path) -> None:
    """The block is laid out anew; gradients that were there before are added to."""
    theirs, found = CASE.model(), options_of(engine, tmp_path, home)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    with streamed(CASE, "4 MiB", **found) as ours:
        optimizer = ts.optimizer(
            ours, torch.optim.SGD, groups=[{"params": list(ours.parameters())}], lr=0.05, momentum=0.9, master=None
        )
        seen = []
        for model, rule in ((theirs, plain), (ours, optimizer)):
            train(model, rule, CASE, steps=1)
            loss_at(model, CASE).backward()
            model.blocks[1].base.requires_grad_(True)
            loss_at(model, CASE).backward()
            gradients = {n: g if g is None else g.clone() for n, g in gradients_of(model).items()}
            rule.step()
            rule.zero_grad()
            model.blocks[1].base.requires_grad_(False)
            model.blocks[2].up.requires_grad_(False)
            seen.append(gradients | train(model, rule, CASE))
        block = handle_of(ours).store.blocks[1]
        assert not block.frozen
        assert handle_of(ours).store.exists(Value(Kind.PARAMETERS, 1))
    assert seen[0]["blocks.1.base.weight"] is not None
    assert_same(*seen)


def test_thawing_while_a_tape_lives_is_refused(tmp_path: Path) -> None:
    with streamed(CASE, "4 MiB", **options_of("auto", tmp_path)) as model:
        loss = loss_at(model, CASE)
        model.blocks[1].base.requires_grad_(True)
        with pytest.raises(InputError, match=r"requires_grad was switched on .* call backward\(\) first"):
            loss_at(model, CASE)
        loss.backward()
        loss_at(model, CASE).backward()
        assert model.blocks[1].base.weight.grad is not None
