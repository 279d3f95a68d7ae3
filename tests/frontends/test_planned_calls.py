"""`ts.plan` of a `Chain`, `Join`, `Loop` and `Program`: the plan that the call then has, what would help, no trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts

FAST = ts.Link(1e12)
FAST_DISK = ts.Machine({(ts.Tier.DISK, ts.Tier.DEVICE): FAST, (ts.Tier.DEVICE, ts.Tier.DISK): FAST})


def layers(n: int = 12) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(n)]


def batch(samples: int = 64) -> torch.Tensor:
    return torch.randn(samples, 64, generator=torch.Generator().manual_seed(0))


def chain(**options: Any) -> ts.Chain:
    return ts.Chain(layers(), device="cpu", **options)


def join(**options: Any) -> ts.Join:
    return ts.Join([layers(6), layers(6)], torch.add, device="cpu", **options)


def program(**options: Any) -> ts.Program:
    net = nn.Sequential(*layers())
    return ts.Program(lambda x: net(x).square().mean(), device="cpu", **options)


def loop(**options: Any) -> ts.Loop:
    return ts.Loop(layers(1)[0], **options)


CALLS: dict[str, tuple[Callable[..., Any], Any, str, str]] = {
    "chain": (chain, batch(), "150KiB", "60KiB"),
    "join": (join, (batch(), batch()), "150KiB", "100KiB"),
    "program": (program, batch(), "200KiB", "60KiB"),
    "loop": (loop, {"state": batch(), "steps": 50}, "300KiB", "60KiB"),
}


def called(front: Any, given: Any) -> Any:
    if isinstance(given, dict):
        return front(**given)
    return front(*given) if isinstance(given, tuple) else front(given)


@pytest.mark.parametrize("name", CALLS)
def test_the_plan_is_that_of_the_call_and_nothing_is_left(name: str) -> None:
    make, given, budget, _ = CALLS[name]
    front = make(budget=budget)
    generator = torch.get_rng_state()
    plan = ts.plan(front, given)
    assert plan.remedies == ()
    assert torch.equal(torch.get_rng_state(), generator)
    with torch.no_grad():
        assert ts.plan(front, given).peak_nbytes == plan.peak_nbytes
    called(front, given).sum().backward()
    if name != "program":  # whose seconds are measured by the call itself
        assert front.plan == plan


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_says_what_fits_and_it_does(name: str) -> None:
    make, given, _, budget = CALLS[name]
    front = make(budget=budget)
    with pytest.raises(ts.BudgetError) as plain:
        ts.plan(front, given)
    with pytest.raises(ts.BudgetError) as told:
        ts.plan(front, given, suggest=True)
    assert told.value.least_nbytes == plain.value.least_nbytes
    assert told.value.budgets
    assert " are filled by " in str(told.value)
    parts = [int(one.split()[3]) for one in str(told.value).split("with ") if one.startswith("the batch in")]
    assert bool(parts) == (name != "loop")
    for number in parts:
        pieces = [one.chunk(number) for one in (given if isinstance(given, tuple) else (given,))]
        for piece in zip(*pieces, strict=True):
            called(front, piece).sum().backward()


@pytest.mark.parametrize("name", ["chain", "program", "loop"])
def test_a_folder_is_named_where_it_helps(name: str, tmp_path: Path) -> None:
    make, given, budget, _ = CALLS[name]
    plan = ts.plan(make(budget=budget, machine=FAST_DISK), given, suggest=True)
    (found,) = (one for one in plan.remedies if "folder=" in one.change)
    assert found.change == f"{name.title()}(..., folder='path/on/a/fast/disk')"
    assert found.seconds < found.before_seconds == plan.seconds
    assert f" {found}" in str(plan)
    followed = ts.plan(make(budget=budget, machine=FAST_DISK, folder=tmp_path), given)
    assert any(followed.simulation.bytes_moved.values())
    assert followed.peak_nbytes <= followed.budget.nbytes(ts.Tier.DEVICE)
    told = ts.plan(make(budget=budget), given, suggest=True).remedies
    assert all("on a disk of 3 GB/s in and 2 GB/s out" in one.change for one in told if "folder=" in one.change)


@pytest.mark.parametrize("name", ["chain", "program", "loop"])
def test_a_named_planner_is_told_of_a_better_one(name: str) -> None:
    make, given, budget, _ = CALLS[name]
    knobs: dict[str, Any] = {} if name == "program" else {"slots": 1}
    plan = ts.plan(make(budget=budget, planner="revolve", **knobs), given, suggest=True)
    (found,) = (one for one in plan.remedies if "planner=" in one.change)
    assert found.change == f"{name.title()}(..., planner='auto')"
    assert found.seconds < plan.seconds


def test_options_of_a_loop_and_a_plan_that_was_given_are_told_of() -> None:
    plan = ts.plan(loop(budget="1MiB", chunk=1), {"state": batch(), "steps": 50}, suggest=True)
    assert any(one.change == "Loop(..., chunk=None)" for one in plan.remedies)
    given = ts.plan(chain(budget="100KiB"), batch())
    plan = ts.plan(chain(budget="1GiB", plan=given), batch(), suggest=True)
    assert [one.change for one in plan.remedies] == ["Chain(..., plan=None)"]


def test_nothing_helps_where_nothing_is_lost() -> None:
    for make, given, _, _ in CALLS.values():
        assert ts.plan(make(budget="1GiB"), given, suggest=True).remedies == ()


def test_what_cannot_be_planned_is_refused() -> None:
    for make, given, _, _ in CALLS.values():
        with pytest.raises(ts.InputError, match=r"plan: budget= has no effect on a .*, which has options of its own"):
            ts.plan(make(budget="1GiB"), given, budget="1GiB")
    with pytest.raises(ts.InputError, match="called with one state, found 2"):
        ts.plan(chain(), (batch(), batch()))
    with pytest.raises(ts.InputError, match="nobody knows how many steps"):
        ts.plan(loop(), {"state": batch(), "until": lambda state: True})
    with pytest.raises(ts.InputError, match="plan: the function saves nothing"):
        ts.plan(ts.Program(torch.neg), batch())
    with pytest.raises(ts.InputError, match="plan: the function returned NoneType"):
        ts.plan(ts.Program(lambda x: None), batch())
    spiking = Spiking()
    with pytest.raises(ts.InputError, match=r"make one, and read its \.plan"):
        ts.plan(ts.Loop(spiking, budget="1MiB"), (batch(), 8))
    assert spiking.potential == 0


class Spiking(nn.Module):
    """Which keeps what the next step reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.potential = nn.Linear(64, 64), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.potential = 0.5 * self.potential + self.layer(x)
        return torch.tanh(self.potential)
