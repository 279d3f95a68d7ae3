"""States of streamed models move below the device and back, beside blocks: same bits, within the budget, none left."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from streamable import MODELS, Chained, Model, numbers
from streaming import assert_exact, budget_at, loss_at, options_of, streamed, train
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module import prepare
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Offload, Tier

WIDE = 64
LONG = Model(lambda: Chained([nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(8)]), numbers(256, WIDE))
STATE = 256 * WIDE * 4
RECORDED = {"frozen_some", "frozen_last", "skipping", "cached", "two_chains"}
"""Models of which even the least budget holds the records of all blocks, so that no state is needed twice."""
SETTINGS = [("adversarial", "disk"), ("auto", "disk"), ("fake_streams", "host"), ("fake_streams", "disk")]


def sgd(model: nn.Module, update: str = "step") -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)


def offloading(folder: Path, engine: str = "adversarial", home: str = "disk") -> dict[str, Any]:
    return options_of(engine, folder, home) | {"planner": "offload"}


def states_moved(model: nn.Module) -> int:
    """How many of them the last step's plans move."""
    last = handle_of(model).last
    assert last is not None
    actions = [action for plan in last.plans for action in plan.schedule]
    return sum(isinstance(a, Offload) and a.value.kind is Kind.STATE for a in actions)


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[nn.Module]:
    found = offloading(tmp_path)
    with streamed(LONG, budget_at("least", LONG, sgd, **found), **found) as model:
        yield model


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)))
def test_every_model(number: int, name: str, tmp_path: Path) -> None:
    case, update, found = MODELS[name], ("step", "backward")[number % 2], offloading(tmp_path)
    budget = budget_at("least", case, lambda m: sgd(m, update), **found)
    assert_exact(case, budget, update=update, **found)
    with streamed(case, budget, **found) as model:
        sgd(model, update)
        seed(3)
        loss_at(model, case).backward()
        assert (states_moved(model) > 0) == (name not in RECORDED)


@pytest.mark.parametrize("level", ["least", "half"])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("engine", "home"), SETTINGS)
def test_every_engine_and_home(engine: str, home: str, update: str, level: str, tmp_path: Path) -> None:
    found = offloading(tmp_path, engine, home)
    budget = budget_at(level, LONG, lambda m: sgd(m, update), **found)
    assert_exact(LONG, budget, update=update, micro_batches=1 + (update == "step"), **found)


def test_what_moves_is_what_was_planned(offloaded: nn.Module) -> None:
    handle, optimizer = handle_of(offloaded), sgd(offloaded)
    for _ in range(3):
        ts.report(offloaded) if handle.last is not None else None
        loss_at(offloaded, LONG).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ts.report(offloaded)
    assert report.bytes_moved == {k: n for k, n in report.plan.simulation.bytes_moved.items() if n}
    assert states_moved(offloaded) >= 6


def held(model: nn.Module) -> int:
    """Bytes of states on disk."""
    below = handle_of(model).homes.states
    below.settle()
    assert below._opened is not None
    return below._opened[0].held_nbytes(Tier.DISK)


def test_nothing_is_left_of_a_call_that_nobody_differentiates(offloaded: nn.Module) -> None:
    train(offloaded, sgd(offloaded), LONG, steps=1)
    for _ in range(3):
        loss = loss_at(offloaded, LONG)
        assert held(offloaded) > 0
        del loss
        gc.collect()
        assert held(offloaded) == 0


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        raise RuntimeError("on purpose")


class Fuse(nn.Module):
    """Hands on what it is given, while it is whole."""

    blown = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Fuse.blown == "forward":
            raise RuntimeError("on purpose")
        return Failing.apply(x) if Fuse.blown else x * 1


FUSED = Model(
    lambda: Chained([nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), Fuse()) for _ in range(8)]), numbers(256, WIDE)
)


def differentiate(model: nn.Module) -> None:
    loss_at(model, FUSED).backward()


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_that_fails_leaves_nothing_and_the_next_is_right(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, plain = offloading(tmp_path), FUSED.model()
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), FUSED)
    with streamed(FUSED, budget_at("least", FUSED, sgd, **found), **found) as model:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        train(model, sgd(model), FUSED, steps=1)
        monkeypatch.setattr(Fuse, "blown", when)
        with pytest.raises(RuntimeError, match="on purpose"):
            differentiate(model)
        monkeypatch.setattr(Fuse, "blown", "")
        gc.collect()
        model.zero_grad()
        assert held(model) == 0
        model.load_state_dict(before)
        assert_same(expected, train(model, sgd(model), FUSED))


FAST = ts.Machine(links={(Tier.DEVICE, Tier.DISK): ts.Link(1e12), (Tier.DISK, Tier.DEVICE): ts.Link(1e12)})


def test_states_move_where_blocks_would_run_a_third_time(tmp_path: Path) -> None:
    found = options_of("adversarial", tmp_path) | {"machine": FAST}
    budget = budget_at("least", LONG, sgd, **found | {"planner": "offload"})
    with streamed(LONG, budget, **found) as model:
        sgd(model)
        loss_at(model, LONG).backward()
        plan = ts.report(model).plan
    others = [seconds for _, seconds, text in plan.alternatives if seconds is not None and "43 forwards" in text]
    assert plan.planner == "offload"
    assert plan.simulation.forwards == 15  # every block twice, but for the last
    assert len(others) == 1
    assert plan.seconds < others[0]
    assert_exact(LONG, budget, **found)


def test_a_plan_that_was_made_before(tmp_path: Path) -> None:
    found = offloading(tmp_path / "home")
    budget = budget_at("least", LONG, sgd, **found)
    with streamed(LONG, budget, **found) as model:
        sgd(model)
        loss_at(model, LONG)
        ts.report(model).plan.save(tmp_path / "plan.json")
    plan = ts.Plan.load(tmp_path / "plan.json")
    assert_exact(LONG, budget, plan=plan, **options_of("adversarial", tmp_path / "home"))


def test_what_may_not_move_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offloading(tmp_path)
    budget = budget_at("least", LONG, sgd, **found)
    with streamed(LONG, budget, **found) as model:
        handle = handle_of(model)
        terms = replace(prepare.terms_of(handle), moves=frozenset())
        monkeypatch.setattr(prepare, "terms_of", lambda handle: terms)
        with pytest.raises(InputError, match="planner 'offload' moves saved tensors to a slower tier"):
            loss_at(model, LONG)
