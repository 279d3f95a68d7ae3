"""Saved tensors of streamed models move below the device and back, beside blocks: same bits, within the budget."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import sgd
from streamable import MODELS, Chained, Model, numbers
from streaming import assert_dropped_calls_leave_nothing, assert_exact, budget_at, loss_at, options_of, streamed, train
from tiered import saved_away
from torch import nn

import tapestream as ts
from tapestream.executor.travel.parcel import Parcels
from tapestream.executor.travel.saved import SavedTensors
from tapestream.frontends import given
from tapestream.frontends.module.stream import handle_of
from tapestream.ir import Kind, Offload, Schedule, Tier
from tapestream.passes.memory import block_values
from tapestream.planning import auto
from tapestream.storage.meter import track_memory

WIDE = 64


def chain_of(blocks: int) -> Model:
    return Model(
        lambda: Chained(
            [nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE)) for _ in range(blocks)]
        ),
        numbers(256, WIDE),
    )


LONG = chain_of(8)
ALL = 1 << 30
FAST = ts.Machine(links={(Tier.DEVICE, Tier.DISK): ts.Link(1e12), (Tier.DISK, Tier.DEVICE): ts.Link(1e12)})
SETTINGS = [("adversarial", "disk"), ("threads", "disk"), ("fake_streams", "host"), ("fake_streams", "disk")]


def saved_moved(model: nn.Module) -> set[int]:
    """Stages whose saved tensors the last step's plans move."""
    last = handle_of(model).last
    assert last is not None
    actions = [action for plan in last.plans for action in plan.schedule]
    return {a.value.index for a in actions if isinstance(a, Offload) and a.value.kind is Kind.SAVED}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> str:
    """A planner by which the saved tensors of all stages but the last leave the device."""

    def plan(profile: ts.Profile, budget: Any, machine: ts.Machine, **knobs: Any) -> Schedule:
        near = Tier.HOST if (Tier.DEVICE, Tier.HOST) in machine.links else Tier.DISK
        return saved_away(len(profile), near)

    for module in (auto, given):
        monkeypatch.setattr(module, "planners", {"by hand": plan})
    return "by hand"


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("number", "name"), [pytest.param(k, name, marks=[pytest.mark.full] * (k % 2)) for k, name in enumerate(MODELS)]
)
def test_every_model(number: int, name: str, tmp_path: Path, by_hand: str) -> None:
    case, update = MODELS[name], ("step", "backward")[number // 2 % 2]
    found = options_of("adversarial", tmp_path) | {"planner": by_hand}
    assert_exact(case, ALL, update=update, **found)
    with streamed(case, ALL, **found) as model:
        sgd(model, update)
        loss_at(model, case).backward()
        assert saved_moved(model)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("engine", "home"), SETTINGS)
def test_every_engine_and_home(engine: str, home: str, update: str, tmp_path: Path, by_hand: str) -> None:
    found = options_of(engine, tmp_path, home) | {"planner": by_hand}
    assert_exact(LONG, ALL, update=update, micro_batches=1 + (update == "step"), **found)


@pytest.mark.parametrize("update", ["step", pytest.param("backward", marks=pytest.mark.full)])
def test_joint_moves_them_where_copies_take_no_time(update: str, tmp_path: Path) -> None:
    case = chain_of(10)  # up to 8 it tries more, which takes longer
    found = options_of("adversarial", tmp_path) | {"planner": "rotor", "machine": FAST}
    budget = budget_at("half", case, lambda model: sgd(model, update), **found)
    found["planner"] = "joint"
    assert_exact(case, budget, update=update, **found)
    with streamed(case, budget, **found) as model:
        sgd(model, update)
        loss_at(model, case).backward()
        plan = ts.report(model).plan
        assert saved_moved(model)
    assert plan.planner == "joint"
    assert plan.simulation.forwards == 10
    assert all(seconds is None or seconds >= plan.seconds for _, seconds, _ in plan.alternatives)


@pytest.fixture
def moving(tmp_path: Path, by_hand: str) -> Iterator[nn.Module]:
    with streamed(LONG, ALL, **options_of("threads", tmp_path), planner=by_hand) as model:
        train(model, sgd(model), LONG, steps=2)
        yield model


def test_what_moves_and_what_is_held_is_what_was_planned(moving: nn.Module) -> None:
    ts.report(moving)
    batch = LONG.batch()
    with track_memory() as meter:
        moving(*batch).square().mean().backward()
    report = ts.report(moving)
    assert saved_moved(moving) == set(range(7))
    assert report.bytes_moved == {lane: n for lane, n in report.plan.simulation.bytes_moved.items() if n}
    between = sum(nbytes for value, nbytes in block_values(report.plan.profile))
    beside = report.plan.peak_nbytes - between  # all blocks stay, and are there when the meter starts
    saved = sum(cost.saved_nbytes for cost in report.plan.profile.stages)
    assert meter.peak_nbytes - between // 3 <= beside * 1.05 < saved


def test_nothing_is_left_of_a_call_that_nobody_differentiates(moving: nn.Module) -> None:
    assert_dropped_calls_leave_nothing(moving, LONG)


def test_a_dropped_call_holds_nothing_on_the_device(moving: nn.Module) -> None:
    """Nor do states that saved tensors show, which do not travel, until the next call settles what is left."""
    loss = loss_at(moving, LONG)
    del loss
    gc.collect()
    below = handle_of(moving).homes.states
    assert below._left
    assert not any(cargo.windows for parcels in below._left for cargo in cargoes(parcels))
    assert not any(Tier.DEVICE in one.copies and not one.under_way for one in all_parcels(below._left))


def all_parcels(left: Iterable[Parcels]) -> list[Any]:
    return [one for parcels in left for one in parcels._parcels.values()]


def cargoes(parcels: Parcels) -> list[Any]:
    return [one.cargo for one in parcels._parcels.values()]


def test_a_write_between_forward_and_backward_is_refused(tmp_path: Path, by_hand: str) -> None:
    """Where saved tensors have gone and come back, too."""
    kept: list[torch.Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDE, WIDE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            if not ts.recomputing():
                kept.append(y.detach())
            return y * y

    case = Model(lambda: Chained([Keeping() for _ in range(4)]), numbers(256, WIDE))
    with streamed(case, ALL, **options_of("adversarial", tmp_path), planner=by_hand) as model:
        loss = loss_at(model, case)
        kept[-4].add_(1)
        with pytest.raises(ts.GradientError, match="modified by an in-place operation"):
            loss.backward()


def test_what_lies_on_another_device_stays() -> None:
    """A number of the CPU's that an operation on a GPU has saved."""
    saved, there = SavedTensors("stage"), [torch.randn(3), torch.randn(3)]
    pack, _ = saved.hooks()
    handles = [pack(tensor) for tensor in there]
    other = there[0].untyped_storage()._cdata
    del there
    saved.settle(lambda tensor, head: head == other)
    assert [saved.stays(t, t.untyped_storage()._cdata) for t in saved.tensors()] == [True, False]
    saved.leave()
    assert [handle.tensor is None for handle in handles] == [False, True]
