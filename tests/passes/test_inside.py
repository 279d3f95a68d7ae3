"""`keep_inside`: what recomputes are spared where bytes are left, within the budget."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import (
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Phase,
    PhaseKind,
    Record,
    Restore,
    Schedule,
    Tier,
    Value,
    dumps,
    loads,
)
from tapestream.passes.inside import keep_inside
from tapestream.passes.memory import footprint
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.simulate import device_nbytes, simulate

FORWARD, BACKWARD, _ = (Phase(kind) for kind in PhaseKind)
LINKS = Machine({(Tier.HOST, Tier.DEVICE): Link(40.0), (Tier.DEVICE, Tier.HOST): Link(40.0)})
COST = StageCost(2.0, 4.0, 10, 100, inside_nbytes=7, inside_seconds=0.5)


def kept_in(schedule: Schedule) -> list[int]:
    return [action.stage for action in schedule if isinstance(action, KeepInside)]


def test_bytes_and_seconds_of_what_is_kept() -> None:
    profile = Profile((COST, replace(COST, inside_nbytes=0, inside_seconds=0.0)), 10)
    actions = [
        FORWARD, Keep(0), KeepInside(0), Forward(0, 1), Record(1), BACKWARD, Backward(1),
        Restore(0), Free(Value(Kind.STATE, 0), Tier.DEVICE), Record(0), Backward(0),
    ]  # fmt: skip
    plain = [action for action in actions if not isinstance(action, KeepInside)]
    kept, without = (Schedule.of(some, 2) for some in (actions, plain))
    assert simulate(without, profile).makespan_seconds - simulate(kept, profile).makespan_seconds == 0.5
    held, before = device_nbytes(kept, profile), device_nbytes(without, profile)
    more = [a - b for a, b in zip([*held[:2], *held[3:]], before, strict=True)]
    assert more == [0, 0, *[7] * 6, 0, 0]  # from the run that makes it up to the one that saves it
    assert [max(pair) for pair in zip(*_around(actions, profile), strict=True)] == held
    assert loads(dumps(kept)) == kept
    assert simulate(kept, profile).peak_nbytes[Tier.DEVICE] == max(held)


def _around(actions: list[object], profile: Profile) -> tuple[list[int], list[int]]:
    found = footprint(actions, profile)
    after = [*found.before[1:].tolist(), 0]
    return found.during.tolist(), after


def test_the_most_seconds_for_each_byte_come_first_and_what_has_no_room_is_left() -> None:
    costs = [replace(COST, inside_nbytes=nbytes, inside_seconds=seconds) for nbytes, seconds in
             ((10, 1.0), (5, 1.0), (10, 1.5), (0, 0.0), (10, 2.0))]  # fmt: skip
    profile = Profile(tuple(costs), 10)
    schedule = planners["periodic"](profile, None, segments=5)
    again = simulate(schedule, profile)
    peak = again.peak_nbytes[Tier.DEVICE]
    found = [set(kept_in(keep_inside(schedule, profile, None, peak + more))) for more in (100, 15)]
    assert found[0] == {0, 1, 2}  # the last is recorded at once
    assert {1, 2} <= found[1]
    assert keep_inside(schedule, replace(profile, stages=(replace(COST, inside_nbytes=0, inside_seconds=0.0),) * 5),
                       None, peak + 100) is schedule  # fmt: skip


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(0, 4))
    blocks = tuple(
        BlockCost(p, p, 2 * p, update_seconds=0.1)
        for p in draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    )
    stages = []
    for _ in range(draw(st.integers(1, 8))):
        saved = draw(st.integers(0, 30))
        inside = draw(st.integers(0, saved))
        stages.append(StageCost(
            draw(st.sampled_from((1.0, 2.0))), 3.0, draw(st.integers(1, 8)), saved,
            block=draw(st.integers(0, count - 1)) if count else None,
            inside_nbytes=inside, inside_seconds=draw(st.sampled_from((0.0, 0.25, 0.5))) if inside else 0.0,
        ))  # fmt: skip
    return Profile(tuple(stages), 2, blocks, turn_nbytes=draw(st.integers(0, 5)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_it_is_never_slower_and_keeps_to_the_budget(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    bare = replace(profile, stages=tuple(replace(c, inside_nbytes=0, inside_seconds=0.0) for c in profile.stages))
    machine = data.draw(st.sampled_from((LINKS, None))) if profile.blocks else None
    knobs = {"update": "step"} if profile.blocks else {}
    with pytest.raises(BudgetError) as refused:
        make_plan(profile, 1, machine, **knobs)
    budget = Budget(refused.value.least_nbytes + data.draw(st.integers(0, 100)))
    plan, other = (make_plan(one, budget, machine, **knobs) for one in (profile, bare))
    assert plan.seconds <= other.seconds
    assert plan.peak_nbytes <= budget.device_nbytes
    assert simulate(plan.schedule, profile, machine, budget) == plan.simulation
    spared = sum(profile.stages[k].inside_seconds for k in kept_in(plan.schedule))
    if machine is None:
        assert other.seconds - plan.seconds == pytest.approx(spared)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="inside_nbytes=101 are a part of saved_nbytes=100"):
        replace(COST, inside_nbytes=101)
    with pytest.raises(InputError, match="inside_seconds"):
        replace(COST, inside_seconds=-1.0)
