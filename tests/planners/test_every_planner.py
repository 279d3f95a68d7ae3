"""Promises that all planners of recomputation make, and the registry."""

from inspect import signature

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import BlockCost, Budget, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Free, Keep, Phase, PhaseKind, Tier
from tapestream.planners import planners, store_all
from tapestream.simulate import simulate

RECOMPUTE = ("store_all", "periodic", "bisection", "revolve", "rotor")


def least_of(name, profile):
    """The least budget by the planner's own word (a profile may need no byte at all)."""
    try:
        return peak_of(planners[name](profile, 1), profile)
    except BudgetError as error:
        return error.least_nbytes


def peak_of(schedule, profile):
    return simulate(schedule, profile).peak_nbytes[Tier.DEVICE]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", RECOMPUTE)
@settings(max_examples=200, deadline=None)
@given(profile=chains(), share=st.floats(0.15, 1.1))
def test_plans_are_accepted_within_the_budget_and_never_slower_with_more(name, profile, share):
    full = simulate(planners["store_all"](profile), profile)
    budget = max(1, round(full.peak_nbytes[Tier.DEVICE] * share))
    least = least_of(name, profile)
    if budget < least:
        try:  # its steps of memory are finer now than for one byte
            planners[name](profile, budget)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert budget < error.least_nbytes <= least  # noqa: PT017
            budget = error.least_nbytes
    schedule = planners[name](profile, budget)
    judged = simulate(schedule, profile, None, Budget(budget))
    assert schedule.planner == name
    assert judged.backwards == judged.recorded == len(profile)
    more = simulate(planners[name](profile, budget + 1 + budget // 5), profile)
    assert full.makespan_seconds <= more.makespan_seconds <= judged.makespan_seconds


@pytest.mark.parametrize("name", RECOMPUTE)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_the_shape_of_a_step(name, n):
    profile = Profile.uniform(n, state_nbytes=4, saved_nbytes=9)
    least = min(peak_of(planners[name](profile, **knobs), profile) for knobs in ({}, *_lean_knobs(name, n)))
    actions = list(planners[name](profile, None if name == "bisection" else least))
    assert actions[0] == Phase(PhaseKind.FORWARD)
    assert sum(isinstance(action, Phase) for action in actions) == 2
    assert sum(isinstance(action, Keep) for action in actions) == sum(isinstance(a, Free) for a in actions)


def _lean_knobs(name, n):
    return {"revolve": [{"slots": 1}], "periodic": [{"segments": k} for k in range(1, n + 1)]}.get(name, [])


@pytest.mark.parametrize("name", RECOMPUTE)
def test_blocks_are_ignored_and_plans_repeat(name):
    stages = tuple(StageCost(1.0, 2.0, 3, 9, block=0) for _ in range(9))
    with_block = Profile(stages, 3, blocks=(BlockCost(10**6, 10**6),))
    plain = with_block.without_blocks()
    budget = peak_of(planners[name](plain), plain)
    assert planners[name](with_block, budget) == planners[name](plain, budget) == planners[name](plain, budget)


@pytest.mark.parametrize("name", RECOMPUTE)
def test_bytes_outside_the_chain_leave_less(name):
    profile = Profile.uniform(30, state_nbytes=2, saved_nbytes=8)
    outside = Profile(profile.stages, 2, outside_nbytes=1000)
    with pytest.raises(BudgetError) as caught:
        planners[name](outside, 1001)
    assert caught.value.least_nbytes > 1001
    assert caught.value.stage is not None
    assert 0 <= caught.value.stage < 30
    assert str(caught.value.least_nbytes) in str(caught.value)
    assert name in str(caught.value)


def test_the_registry_knows_names_and_knobs():
    assert set(RECOMPUTE) <= set(planners)
    assert "nothing" not in planners
    with pytest.raises(InputError, match=r"no planner 'revolv'; there are .*store_all.*did you mean 'revolve'"):
        planners["revolv"]
    with pytest.raises(InputError, match=r"no knob 'slot'; its knobs are slots; did you mean 'slots'"):
        planners["revolve"](Profile.uniform(3), slot=2)
    with pytest.raises(InputError, match=r"'store_all' has no knob 'slots'; it has none"):
        planners["store_all"](Profile.uniform(3), slots=2)
    assert "memory_steps" in signature(planners["rotor"].__wrapped__).parameters
    with pytest.raises(TypeError):
        planners["mine"] = store_all.plan


def test_store_all_is_as_small_for_ten_million_steps():
    profile = Profile.uniform(10_000_000)
    schedule = planners["store_all"](profile, 10**9)
    judged = simulate(schedule, profile)
    assert judged.forwards == judged.recorded == 10_000_000
    assert judged.peak_nbytes[Tier.DEVICE] == 20_000_002
