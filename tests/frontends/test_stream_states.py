"""States of streamed models move below the device and back, beside blocks: same bits, within the budget, none left."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from pairs import sgd
from streamable import MODELS, Chained, Model, numbers
from streaming import (
    assert_dropped_calls_leave_nothing,
    assert_exact,
    budget_at,
    held_below,
    loss_at,
    options_of,
    streamed,
    train,
)
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, InputError
from tapestream.executor.engines.threads import ThreadsEngine
from tapestream.frontends.below import Below
from tapestream.frontends.module.plans import prepare
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Offload, Tier
from tapestream.storage.meter import track_memory

WIDE = 64
LONG = Model(lambda: Chained([nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(8)]), numbers(256, WIDE))
STATE = 256 * WIDE * 4
RECORDED = {"frozen_some", "frozen_last", "skipping", "cached", "two_chains", "scaled"}
"""Models of which even the least budget holds the records of all blocks, so that no state is needed twice."""
SETTINGS = [("adversarial", "disk"), ("auto", "disk"), ("fake_streams", "host"), ("fake_streams", "disk")]


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


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("number", "name"), [pytest.param(k, name, marks=[pytest.mark.full] * (k % 2)) for k, name in enumerate(MODELS)]
)
def test_every_model(number: int, name: str, tmp_path: Path) -> None:
    case, update, found = MODELS[name], ("step", "backward")[number % 2], offloading(tmp_path)
    budget = budget_at("least", case, lambda m: sgd(m, update), **found)
    assert_exact(case, budget, update=update, **found)
    with streamed(case, budget, **found) as model:
        sgd(model, update)
        seed(3)
        loss_at(model, case).backward()
        assert (states_moved(model) > 0) == (name not in RECORDED)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("level", ["least", "half"])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("engine", "home"), SETTINGS)
def test_every_engine_and_home(engine: str, home: str, update: str, level: str, tmp_path: Path) -> None:
    found = offloading(tmp_path, engine, home)
    budget = budget_at(level, LONG, lambda m: sgd(m, update), **found)
    assert_exact(LONG, budget, update=update, micro_batches=1 + (update == "step"), **found)


@pytest.mark.parametrize("engine", ["adversarial", "auto", "fake_streams"])
def test_blocks_and_states_share_the_disk(engine: str, tmp_path: Path) -> None:
    """What both hold is what was planned, to the byte: a limit of that will do, one less does not."""
    found = offloading(tmp_path, engine)
    budget = budget_at("least", LONG, sgd, **found)

    def steps(nbytes: int | None) -> tuple[int, int]:
        with streamed(LONG, ts.Budget(budget, disk=nbytes), **found) as model:
            train(model, sgd(model), LONG)
            report = ts.report(model)
            return report.plan.simulation.peak_nbytes[Tier.DISK], report.peak_nbytes[Tier.DISK]

    planned, held = steps(None)
    assert planned == held > 6 * STATE
    assert steps(planned) == (planned, planned)
    with pytest.raises(BudgetError, match=rf"Allow {planned} bytes there"):
        steps(planned - 1)


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


def test_nothing_is_left_of_a_call_that_nobody_differentiates(offloaded: nn.Module) -> None:
    train(offloaded, sgd(offloaded), LONG, steps=1)
    assert_dropped_calls_leave_nothing(offloaded, LONG)


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
        assert held_below(model) == 0
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


class Fed(nn.Module):
    """A block that is given what all others are given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.given = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x) + self.given(given))


class Feeding(Chained):
    def __init__(self) -> None:
        super().__init__([Fed() for _ in range(12)], nn.Linear(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = torch.tanh(self.before(x))
        for block in self.blocks:
            x = block(x, given)
        return x


def test_what_passes_through_all_states_makes_no_room(tmp_path: Path) -> None:
    """The model holds it from the first block to the last, wherever states lie."""
    case, found = Model(Feeding, numbers(1024, WIDE)), offloading(tmp_path, "auto")
    budget = budget_at("least", case, sgd, **found)
    with streamed(case, budget, **found) as model:
        optimizer, handle = sgd(model), handle_of(model)
        train(model, optimizer, case, steps=1)
        for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
            batch = case.batch()
            gc.collect()
            gradients = sum(p.nbytes for p in handle.outside_parameters())
            before = handle.pool.held_nbytes(Tier.DEVICE) + prepare.outside_nbytes(handle) - gradients
            with track_memory() as meter:
                model(*batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert states_moved(model) > 0
        assert before + meter.peak_nbytes <= 1.05 * budget


def test_ctrl_c_while_a_copy_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offloading(tmp_path, "threads")
    with streamed(LONG, budget_at("least", LONG, sgd, **found), **found) as model:
        train(model, sgd(model), LONG, steps=1)
        copy, left = ThreadsEngine.copy, [0]

        def interrupted(self: ThreadsEngine, *given: Any) -> Any:
            ticket = copy(self, *given)
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return ticket

        for number in range(0, 32, 3):
            left[0] = number
            monkeypatch.setattr(ThreadsEngine, "copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loss_at(model, LONG).backward()
            monkeypatch.setattr(ThreadsEngine, "copy", copy)
            gc.collect()
            model.zero_grad()
            assert not handle_of(model)._live.calls
            loss_at(model, LONG).backward()
            model.zero_grad()


def test_a_gpu_without_a_number() -> None:
    """States on the first GPU move where "cuda" was asked for."""
    below = Below(torch.device("meta"), home="device", folder=None, budget=ts.Budget(), machine=None, engine="threads")
    for device, other in ((torch.device("meta"), False), (torch.device("meta", 1), True)):
        below.device = device
        here = torch.empty(3, device=torch.device("meta", 0))
        assert below.elsewhere(here) == other
    assert below.elsewhere(torch.empty(3))


class Showing(nn.Module):
    """Returns its own weight, or a part of it, as a part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, state: Any) -> Any:
        x, weight = state
        return torch.tanh(self.linear(x) + weight), self.linear.weight[:1]


class Shown(Chained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x, torch.zeros(1, WIDE)
        for block in self.blocks:
            state = block(state)
        return state[0]


@pytest.mark.parametrize("planner", ["offload", "auto"])
def test_blocks_that_return_their_own_weights_are_refused(planner: str, tmp_path: Path) -> None:
    """Their memory is another block's when it is read."""
    case = Model(lambda: Shown([Showing() for _ in range(4)]), numbers(3, WIDE))
    with (
        streamed(case, "1 MiB", **options_of("auto", tmp_path) | {"planner": planner}) as model,
        pytest.raises(InputError, match=r"block 0 \(Showing\) returns one of its parameters.*clone\(\) of it"),
    ):
        loss_at(model, case)
    assert_exact(case, 1 << 20, **options_of("auto", tmp_path, "device"))
