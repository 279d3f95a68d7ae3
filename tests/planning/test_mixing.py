"""Plans that update each block where the step is fastest, and updates in RAM of what RAM has no room for."""

from dataclasses import replace
from typing import Any

import pytest
import questions
from test_where import with_host_updates

from tapestream.costs import Budget
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Kind, Offload, Prefetch, Tier, Update, Value, dumps, loads
from tapestream.planning import auto
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate

HOST, DEVICE, DISK = Tier.HOST, Tier.DEVICE, Tier.DISK
SEEDS = [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.full), 5, 6]


def asked(seed: int, update: str, where: str, rate: float, **options: Any) -> Plan:
    question = replace(questions.drawn(seed), update=update, ram=1e13)
    profile = with_host_updates(question.profile, rate)
    options = {"update": update, "where": where, **options}
    return make_plan(profile, question.budget, question.machine, **options)


def updated(plan: Plan, tier: Tier) -> frozenset[int]:
    return frozenset(one.block for one in plan.schedule if isinstance(one, Update) and one.tier is tier)


@pytest.mark.parametrize("rate", [0.1, 0.03])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_mix_is_as_fast_as_all_in_one_place(seed: int, update: str, rate: float) -> None:
    try:
        plan = asked(seed, update, "mixed", rate)
    except BudgetError:
        pytest.skip("the card is too small")
    others = [asked(seed, update, where, rate) for where in ("device", "host")]
    assert plan.fastest_seconds is not None
    assert plan.fastest_seconds <= min(other.fastest_seconds or 0.0 for other in others)
    assert plan.seconds <= 1.03 * min(other.seconds for other in others)
    on_device, on_host = updated(plan, DEVICE), updated(plan, HOST)
    assert not on_device & on_host
    assert on_device | on_host == frozenset(range(len(plan.profile.blocks)))
    assert loads(dumps(plan.schedule)) == plan.schedule


def test_mixing_pays_where_ram_is_slow_and_is_said() -> None:
    found = [asked(seed, "backward", where, 0.03) for seed in (2,) for where in ("device", "host", "mixed")]
    took = [one.fastest_seconds or 0.0 for one in found]
    assert took[2] < 0.95 * min(took[:2])
    on_device, on_host = updated(found[2], DEVICE), updated(found[2], HOST)
    assert on_device
    assert on_host
    assert f"of {len(on_host)} blocks in HOST" in str(found[2])
    assert f"of {len(on_device)} on the device" in str(found[2])


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", [0, 2, 5])
def test_blocks_are_updated_where_it_was_said(seed: int, update: str) -> None:
    there = frozenset({0, 3, 5})
    plan = asked(seed, update, "mixed", 0.1, updated_on_device=there)
    assert updated(plan, DEVICE) == there
    assert updated(plan, HOST) == frozenset(range(len(plan.profile.blocks))) - there
    late = {value.index for value, tier in plan.schedule.resident if value.kind is Kind.GRADIENT and tier is HOST}
    assert late == (updated(plan, HOST) if update == "step" else set())


def test_none_and_all_on_the_device_are_the_plans_of_that() -> None:
    every = frozenset(range(len(questions.drawn(2).profile.blocks)))
    for there, where in ((frozenset[int](), "host"), (every, "device")):
        mixed, one = asked(2, "step", "mixed", 0.1, updated_on_device=there), asked(2, "step", where, 0.1)
        assert mixed.schedule == one.schedule


def test_a_long_chain_is_mixed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_DEEP", 6)
    monkeypatch.setattr(auto, "_WIDTH", 4)
    plan = asked(0, "backward", "mixed", 0.03)
    assert updated(plan, DEVICE) | updated(plan, HOST) == frozenset(range(len(plan.profile.blocks)))
    assert simulate(plan.schedule, plan.profile, plan.machine, plan.budget).makespan_seconds == plan.seconds


def test_blocks_elsewhere_cannot_be_mixed() -> None:
    question = questions.drawn(0)
    with pytest.raises(InputError, match=r"updates in RAM \(where='host' or 'mixed'\) were asked for, but"):
        make_plan(question.profile, question.budget, question.machine, update="step", home=DEVICE, where="mixed")


# -- RAM without room for all of it -----------------------------------------------------------------------------------


def in_little_ram(seed: int, update: str, share: float, where: Any = "host") -> Plan:
    """``share``: of what all blocks take, that RAM has room for."""
    question = replace(questions.drawn(seed), update=update)
    profile = with_host_updates(question.profile, 0.1)
    total = sum(b.parameters_nbytes + b.gradient_nbytes + b.optimizer_state_nbytes for b in profile.blocks)
    budget = Budget(question.budget.device_nbytes, host=int(share * total))
    return make_plan(profile, budget, question.machine, update=question.update, where=where)


@pytest.mark.parametrize("where", ["host", "mixed"])
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", [0, 2, 6])
def test_what_ram_has_no_room_for_lives_on_the_disk(seed: int, update: str, where: str) -> None:
    plan = in_little_ram(seed, update, 0.7, where)
    host = plan.budget.host_nbytes
    assert host is not None
    assert plan.simulation.peak_nbytes[HOST] <= host
    on_disk = {value for value, tier in plan.schedule.resident if tier is DISK}
    if where == "host":  # a mix may have it on the card
        assert on_disk
        assert updated(plan, HOST) == frozenset(range(len(plan.profile.blocks)))
    written = [a.value for a in plan.schedule if isinstance(a, Offload) and a.target is DISK]
    read = [a.value for a in plan.schedule if isinstance(a, Prefetch) and a.source is DISK]
    states = sorted(str(value) for value in on_disk if value.kind is Kind.OPTIMIZER_STATE)
    for moved in (read, written):  # each once a step
        assert sorted(str(value) for value in moved if value.kind is Kind.OPTIMIZER_STATE) == states
    late = {value.index for value, tier in plan.schedule.resident if value.kind is Kind.GRADIENT}
    assert late.isdisjoint(value.index for value in on_disk)
    assert loads(dumps(plan.schedule)) == plan.schedule


@pytest.mark.parametrize("update", ["step", "backward"])
def test_more_ram_is_never_slower_with_updates_there(update: str) -> None:
    took = [in_little_ram(2, update, share).fastest_seconds for share in (0.5, 0.7, 0.9, 1.3)]
    assert took == sorted(took, reverse=True)


def test_updates_of_what_still_fits_go_on_under_the_next_forward() -> None:
    plan = in_little_ram(6, "step", 0.8)
    late = {value.index for value, tier in plan.schedule.resident if value == Value(Kind.GRADIENT, value.index)}
    assert late
    assert late < set(range(len(plan.profile.blocks)))
