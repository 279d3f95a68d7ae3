"""Plans whose blocks are updated in RAM."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import questions

from tapestream.costs import Budget, Link, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Kind, Offload, Prefetch, Tier, Update, Value, dumps, loads
from tapestream.passes.hoist import hide_copies
from tapestream.passes.host_room import HostRoom
from tapestream.planning import auto, fastest
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate

HOST, DEVICE, DISK = Tier.HOST, Tier.DEVICE, Tier.DISK


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


STATE = {Kind.PARAMETERS: HOST, Kind.BUFFERS: HOST, Kind.GRADIENT: HOST, Kind.OPTIMIZER_STATE: DISK}
BELOW: dict[str, Tier | dict[Kind, Tier]] = {"all": DISK, "state": STATE}


def planned_from_disk(seed: int, update: str, home: str, windows: float, extra_nbytes: int = 0) -> Plan:
    """``windows``: how many times RAM has room for all that the update of a block needs, beside what lives there."""
    question = replace(questions.drawn(seed), update=update)
    profile = with_host_updates(question.profile, 0.1)
    blocks = tuple(replace(block, update_extra_nbytes=extra_nbytes) for block in profile.blocks)
    whole = blocks[0].parameters_nbytes + blocks[0].gradient_nbytes + blocks[0].optimizer_state_nbytes
    lives = sum(b.parameters_nbytes + b.gradient_nbytes for b in blocks) if home == "state" else 0
    budget = Budget(question.budget.device_nbytes, host=int(lives + windows * whole + extra_nbytes))
    return make_plan(
        replace(profile, blocks=blocks), budget, question.machine, update=update, home=BELOW[home], where="host"
    )  # type: ignore[call-overload, unused-ignore]


@pytest.mark.parametrize("home", BELOW)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("seed", [0, 1, 2, 6])
def test_what_lives_on_disk_passes_ram_and_is_written_once(seed: int, update: str, home: str) -> None:
    plan = planned_from_disk(seed, update, home, 2.5, extra_nbytes=1 << 20)
    blocks = range(len(plan.profile.blocks))
    updates = [action for action in plan.schedule if isinstance(action, Update)]
    assert {(one.block, one.tier) for one in updates} == {(block, HOST) for block in blocks}
    assert not any(value.kind is Kind.GRADIENT for value, _ in plan.schedule.resident)  # none is late
    written = [a.value for a in plan.schedule if isinstance(a, Offload) and a.target is DISK]
    states = {Value(Kind.OPTIMIZER_STATE, b, part) for b in blocks for part in range(len(plan.profile.blocks[0].parts))}
    read = [a.value for a in plan.schedule if isinstance(a, Prefetch) and a.source is DISK and a.value in states]
    assert sorted(map(str, read)) == sorted(map(str, states))  # each once
    expected = set(states)
    if home == "all":
        expected |= {Value(Kind.PARAMETERS, block) for block in blocks}
        expected |= {Value(Kind.GRADIENT, block) for block in blocks} if update == "step" else set()
    assert sorted(map(str, written)) == sorted(map(str, expected))
    assert plan.simulation.bytes_moved.get((HOST, DEVICE), 0) <= 4 * sum(
        b.parameters_nbytes for b in plan.profile.blocks
    )
    assert loads(dumps(plan.schedule)) == plan.schedule


@pytest.mark.parametrize("home", BELOW)
@pytest.mark.parametrize("update", ["step", "backward"])
def test_more_ram_never_makes_updates_from_disk_slower(update: str, home: str) -> None:
    took = [planned_from_disk(2, update, home, windows).fastest_seconds for windows in (1.5, 2.5, 4, 9)]
    assert all(later <= before * 1.02 for before, later in itertools.pairwise(took))
    plan = planned_from_disk(2, update, home, 4)
    lane = max(plan.simulation.bytes_moved[DISK, HOST] / 1.0, plan.simulation.bytes_moved[HOST, DISK] * 1.5)
    assert plan.seconds <= 2.2 * lane / questions.drawn(2).disk


@pytest.mark.parametrize("home", BELOW)
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_listed_schedule_of_updates_from_disk_takes_what_the_judge_says(
    update: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of RAM, too: else those that fit would be refused, or looked at in vain."""
    seen: list[tuple[float, float, int, int]] = []
    timed, check = fastest.timed, HostRoom.check
    rooms: list[int] = []

    def judged(candidate: Any, terms: Any, budget: Any) -> Any:
        found = timed(candidate, terms, budget)
        simulation = simulate(found.schedule, terms.profile, terms.machine)
        seen.append((found.seconds, simulation.makespan_seconds, rooms[-1], simulation.peak_nbytes[HOST]))
        return found

    monkeypatch.setattr(fastest, "timed", judged)
    monkeypatch.setattr(HostRoom, "check", lambda room, allowed: (rooms.append(room.most), check(room, allowed))[1])
    planned_from_disk(0, update, home, 3, extra_nbytes=1 << 20)
    assert seen
    for listed, seconds, most, peak in seen:
        assert listed == pytest.approx(seconds)
        assert most >= peak


@pytest.mark.parametrize("home", BELOW)
@pytest.mark.parametrize("update", ["step", "backward"])
def test_hoisting_finds_updates_from_disk_again(update: str, home: str) -> None:
    plan = planned_from_disk(2, update, home, 6)
    again = hide_copies(plan.schedule, plan.profile, plan.budget, plan.machine)
    found = simulate(again, plan.profile, plan.machine, plan.budget)
    assert found.bytes_moved == plan.simulation.bytes_moved


def test_a_deep_chain_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_DEEP", 6)
    monkeypatch.setattr(auto, "_WIDTH", 4)
    plan = planned_from_disk(1, "backward", "state", 9)
    assert {one.block for one in plan.schedule if isinstance(one, Update) and one.tier is HOST} == set(range(8))


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
    with pytest.raises(
        InputError, match="parameters of blocks live in DISK and RAM is the device: where='host' is for"
    ):
        make_plan(known, budget, Machine({(DISK, DEVICE): Link(1e9), (DEVICE, DISK): Link(1e9)}),
                  update="step", where="host", home=DISK)  # fmt: skip
    with pytest.raises(InputError, match="ranks divide each block among them"):
        make_plan(replace(known, shards=2), budget, replace(machine, peers=next(iter(machine.links.values()))),
                  update="step", where="host")  # fmt: skip
    lives = sum(block.optimizer_state_nbytes + block.parameters_nbytes for block in known.blocks)
    with pytest.raises(BudgetError, match="HOST"):
        make_plan(known, Budget(budget.device_nbytes, host=lives), machine, update="step", where="host", home=HOST)
