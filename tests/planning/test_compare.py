"""`compare`, `trade_off` and their picture."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.planning import tradeoff
from tapestream.planning.auto import make_plan
from tapestream.planning.compare import compare, curves, spaced, trade_off
from tapestream.simulate import simulate

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LINKS = Machine({(HOST, DEVICE): Link(4.0), (DEVICE, HOST): Link(4.0)})
EQUAL = Profile((StageCost(1.0, 2.0, 2, 8),) * 12, 2)
UNEQUAL = Profile((*EQUAL.stages[:-1], StageCost(3.0, 2.0, 4, 8)), 2)


def test_every_planner_is_tried_and_the_fastest_comes_first() -> None:
    told: list[tuple[str, int, int]] = []
    found = compare(EQUAL, 60, LINKS, told=lambda *words: told.append(words))
    assert {one.planner for one in found} == set(planners)
    assert told[-1] == ("planners", len(planners), len(planners))
    fitting = [one for one in found if one.plan is not None]
    assert found[: len(fitting)] == sorted(fitting, key=lambda one: one.seconds)
    for one in fitting:
        assert one.plan == make_plan(EQUAL, 60, LINKS, planner=one.planner)
        assert one.plan.peak_nbytes <= 60
    assert any(one.plan.simulation.bytes_moved for one in fitting)
    (refused,) = (one for one in found if one.planner == "store_all")
    assert refused.applies
    assert refused.least_nbytes == 124 == make_plan(EQUAL, planner="store_all").peak_nbytes
    assert "124 bytes" in refused.reason
    assert found[-1].seconds == float("inf")


def test_equal_stages_need_not_be_written_as_such_and_their_blocks_may_differ() -> None:
    uniform = Profile.uniform(12, forward_seconds=1.0, backward_seconds=2.0, state_nbytes=2, saved_nbytes=8)
    budget = Budget(60)
    for name in ("mixed", "h_revolve", "disk_revolve", "periodic_disk_revolve", "double", "async_multistage"):
        schedule = planners[name](EQUAL, budget, LINKS)
        assert schedule == planners[name](uniform, budget, LINKS)
        assert simulate(schedule, EQUAL, LINKS, budget) == simulate(schedule, uniform, LINKS, budget)
        with pytest.raises(InputError, match="is for equal stages"):
            planners[name](UNEQUAL, budget, LINKS)
    stages = tuple(replace(cost, block=k) for k, cost in enumerate(EQUAL.stages[:5]))
    found = compare(Profile(stages, 2, (BlockCost(4, 4, 8),) * 5), 90, LINKS, update="step")
    assert all(one.applies for one in found)
    assert sum(one.plan is not None for one in found) > 9


def test_those_that_do_not_apply_come_last_and_say_why() -> None:
    found = compare(UNEQUAL, 60, LINKS)
    late = [one for one in found if not one.applies]
    assert found[-len(late) :] == late
    assert {one.planner for one in late} >= {"mixed", "h_revolve", "double"}
    assert all("equal stages" in one.reason for one in late if one.planner in ("mixed", "h_revolve"))
    assert all(one.plan is None for one in compare(UNEQUAL, 1, LINKS))


def test_a_curve_falls_with_the_budget_and_ends_with_everything_stored() -> None:
    found = trade_off(EQUAL, LINKS, points=3)
    assert set(found) == set(planners)
    for name, plans in found.items():
        assert [plan.budget.device_nbytes for plan in plans] == sorted(plan.budget.device_nbytes or 0 for plan in plans)
        if name in ("store_all", "rotor", "revolve"):
            seconds = [plan.seconds for plan in plans]
            assert seconds == sorted(seconds, reverse=True)
    assert found["rotor"][-1].overhead == found["store_all"][-1].overhead == 1.0
    assert [plan.peak_nbytes for plan in found["store_all"]] == [124]
    smallest = min(plan.peak_nbytes for plans in found.values() for plan in plans)
    for name in planners:
        with pytest.raises(BudgetError):
            make_plan(EQUAL, smallest - 1, LINKS, planner=name)


def test_curves_end_where_nothing_is_to_be_gained() -> None:
    asked: list[int] = []

    def planned(_name: str, nbytes: int) -> object:
        asked.append(nbytes)
        return make_plan(EQUAL, nbytes, planner="rotor")

    curves(["rotor"], [124, 200, 300], planned, enough_seconds=36.0)  # type: ignore[arg-type, return-value]
    assert asked == [124]
    assert spaced(10, 1000, 3) == [10, 100, 1000]
    assert spaced(7, 7, 5) == [7]


def test_the_picture_names_planners_of_one_curve_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trade.svg"
    points = {"first": [(100, 2.0), (200, 1.0), (150, 3.0)], "second": [(100, 2.0), (200, 1.0)], "third": [(300, 1.0)]}
    terms = {"allowed_nbytes": 150, "stored_seconds": 0.5, "device": "GPU", "title": "a title"}
    tradeoff.draw(path, points, **terms)  # type: ignore[arg-type]
    words = path.read_text()
    assert all(f"<!-- {word} -->" in words for word in ("first,", "second", "third", "budget asked for", "a title"))
    assert "<!-- first -->" not in words
    assert tradeoff.unbeaten(points["first"]) == points["second"]
    with pytest.raises(InputError, match="no folder"):
        tradeoff.draw(tmp_path / "no folder" / "trade.png", points, **terms)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"tapestream\[plots\]"):
        tradeoff.draw(path, points, **terms)  # type: ignore[arg-type]
