"""`Plan`: what it prints, saves, loads and draws."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tapestream.costs import BlockCost, Budget, Carried, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan

DISK, DEVICE = Tier.DISK, Tier.DEVICE
MACHINE = Machine({(DISK, DEVICE): Link(20.0, 0.01, 8.0), (DEVICE, DISK): Link(15.0, 0.01)}, 1e9, "a machine")


def streamed_plan() -> Plan:
    stages = tuple(StageCost(1.0, 2.0, 4, 6, block=k) for k in range(6))
    profile = Profile(stages, 4, (BlockCost(10, 10, 20, 1, 0.1),) * 6, (Carried(1, 3, 2),), 3, 4, 0.5)
    return make_plan(profile, 120, MACHINE, update="step")


def test_a_loaded_plan_is_the_saved_one(tmp_path: Path) -> None:
    for plan in (streamed_plan(), make_plan(Profile.uniform(50), 20)):
        path = tmp_path / "plan.json"
        plan.save(path)
        assert Plan.load(path) == plan
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("damage", ["cut", "format", "schedule", "budget", "missing", "list"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    streamed_plan().save(path)
    text = path.read_text()
    document = json.loads(text)
    match damage:
        case "cut":
            text = text[: len(text) // 2]
        case "list":
            text = "[1, 2]"
        case "missing":
            del document["profile"]
        case "budget":
            document["budget"][0] = 1
        case "format":
            document["format"] = "something else"
        case _:
            lines = document["schedule"].splitlines()
            document["schedule"] = "\n".join(lines[: len(lines) // 2])
    path.write_text(text if damage in ("cut", "list") else json.dumps(document))
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(StorageError, match="folder"):
        streamed_plan().save(tmp_path / "no folder" / "plan.json")


def test_it_prints_who_made_it_what_it_takes_and_the_next_best() -> None:
    plan = streamed_plan()
    text = str(plan)
    assert f"by {plan.planner}" in text
    assert "RAM" in text
    assert "DISK to RAM" in text
    assert "120 B allowed" in text
    assert f"overhead {plan.overhead:.2f}" in text
    assert all(name in text for name, _, _ in plan.alternatives)
    assert max(map(len, text.splitlines())) <= 120


def test_overhead_is_against_everything_stored() -> None:
    profile = Profile(tuple(StageCost(1.0, 2.0, 4, 6) for _ in range(9)), 4, turn_seconds=1.0)
    assert make_plan(profile).overhead == 1.0
    plan = make_plan(profile, planner="bisection")
    assert plan.overhead == pytest.approx((plan.simulation.forwards + 9 * 2 + 1) / (9 * 3 + 1))


def test_a_schedule_that_does_not_fit_makes_no_plan() -> None:
    profile = Profile.uniform(9)
    with pytest.raises(BudgetError):
        Plan.judged(planners["store_all"](profile), profile, Budget(3), None)


_LABELS = ("backward", "waiting for copies", "budget", "seconds", "DISK to RAM", "stage", "saved tensors, RAM")


def test_it_draws(tmp_path: Path) -> None:
    for ending in ("png", "svg"):
        path = tmp_path / f"plan.{ending}"
        streamed_plan().plot(path)
        assert path.stat().st_size > 5000
    words = path.read_text()
    assert all(f"<!-- {word} -->" in words for word in _LABELS)
    with pytest.raises(InputError, match="nothing"):
        streamed_plan().plot(tmp_path / "plan.nothing")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"tapestream\[plots\]"):
        streamed_plan().plot(tmp_path / "plan.png")
