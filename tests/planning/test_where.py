"""Plans whose blocks are updated in RAM."""

from dataclasses import replace
from pathlib import Path

import pytest
import questions

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Kind, Offload, Prefetch, Tier, Update, dumps, loads
from tapestream.passes.hoist import hide_copies
from tapestream.planning import auto
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate

HOST, DEVICE = Tier.HOST, Tier.DEVICE


def with_host_updates(profile: Profile, rate: float) -> Profile:
    """``rate``: of those of the device."""
    blocks = (replace(block, host_update_seconds=block.update_seconds / rate) for block in profile.blocks)
    return replace(profile, blocks=tuple(blocks))


def planned(seed: int, update: str, where: str, rate: float = 0.1, **changes: float) -> Plan:
    question = replace(questions.drawn(seed), update=update)
    question = replace(question, ram=1e13, **{name: getattr(question, name) * by for name, by in changes.items()})
    profile = with_host_updates(question.profile, rate)
    return make_plan(profile, question.budget, question.machine, update=question.update, where=where)  # type: ignore[arg-type]


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.full), 5, 6])
def test_every_trained_block_is_updated_in_ram_once(seed: int, update: str) -> None:
    try:
        plan = planned(seed, update, "host")
    except BudgetError:
        pytest.skip("the card is too small")
    updates = [action for action in plan.schedule if isinstance(action, Update)]
    assert {(one.block, one.tier) for one in updates} == {(block, HOST) for block in range(len(plan.profile.blocks))}
    assert plan.simulation.updated == {HOST: frozenset(range(len(plan.profile.blocks)))}
    late = {value for value, tier in plan.schedule.resident if value.kind is Kind.GRADIENT and tier is HOST}
    assert len(late) == (len(plan.profile.blocks) if update == "step" else 0)
    # Gradients go down once; weights go up, and neither they nor state come down.
    gradients = sum(block.gradient_nbytes for block in plan.profile.blocks)
    moved = {action.value.kind for action in plan.schedule if isinstance(action, Offload | Prefetch)}
    assert Kind.OPTIMIZER_STATE not in moved
    assert plan.simulation.bytes_moved[DEVICE, HOST] >= gradients
    assert loads(dumps(plan.schedule)) == plan.schedule


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", [0, 2, 5])
def test_seconds_grow_with_those_of_updates_and_no_faster(seed: int, update: str) -> None:
    took = [planned(seed, update, "host", rate).fastest_seconds for rate in (1e3, 0.3, 0.1, 0.03)]
    assert took == sorted(took)
    updates = sum(block.update_seconds for block in planned(seed, update, "device").profile.blocks)
    assert took[-1] <= took[0] + updates / 0.03 * 1.001
    assert took[-1] >= updates / 0.03  # one lane


@pytest.mark.parametrize("update", ["step", "backward"])
def test_hoisting_finds_updates_again(update: str) -> None:
    plan = planned(2, update, "host")
    again = hide_copies(plan.schedule, plan.profile, plan.budget, plan.machine)
    found = simulate(again, plan.profile, plan.machine, plan.budget)
    assert found.bytes_moved == plan.simulation.bytes_moved
    assert found.makespan_seconds == pytest.approx(plan.seconds, rel=0.05)


def test_a_saved_plan_is_the_same(tmp_path: Path) -> None:
    plan = planned(1, "step", "host")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.schedule == plan.schedule
    assert again.seconds == plan.seconds


def test_it_is_told_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = planned(1, "step", "host")
    count = len(plan.profile.blocks)
    assert f"updates      of {count} blocks in HOST" in str(plan)
    plan.plot(tmp_path / "plan.svg")
    assert "updates on HOST" in (tmp_path / "plan.svg").read_text() or (tmp_path / "plan.svg").stat().st_size > 10_000
    assert "updates" not in str(planned(1, "step", "device"))


def test_a_deep_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    question = questions.drawn(3)
    question = replace(question, blocks=96, card=question.card * 6, ram=1e13, update="step")
    profile = with_host_updates(question.profile, 0.1)
    full = make_plan(profile, question.budget, question.machine, update="step", where="host")
    monkeypatch.setattr(auto, "_DEEP", 90)
    monkeypatch.setattr(auto, "_WIDTH", 48)
    plan = make_plan(profile, question.budget, question.machine, update="step", where="host")
    assert {one.block for one in plan.schedule if isinstance(one, Update) and one.tier is HOST} == set(range(96))
    assert plan.seconds <= 1.03 * full.seconds


def test_what_cannot_be_is_one_line() -> None:
    question = replace(questions.drawn(0), ram=1e13)
    plain, known = question.profile, with_host_updates(question.profile, 1.0)
    machine, budget = question.machine, question.budget
    with pytest.raises(InputError, match="the profile does not say how long that of block 0 takes"):
        make_plan(plain, budget, machine, update="step", where="host")
    with pytest.raises(InputError, match="parameters of blocks live in DISK: where='host' is for"):
        make_plan(known, budget, machine, update="step", where="host", home=Tier.DISK)
    with pytest.raises(InputError, match="ranks divide each block among them"):
        make_plan(replace(known, shards=2), budget, replace(machine, peers=next(iter(machine.links.values()))),
                  update="step", where="host")  # fmt: skip
    lives = sum(block.optimizer_state_nbytes + block.parameters_nbytes for block in known.blocks)
    with pytest.raises(BudgetError, match="HOST"):
        make_plan(known, Budget(budget.device_nbytes, host=lives), machine, update="step", where="host")
