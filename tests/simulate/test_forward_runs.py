"""Runs of forwards are judged in one go: the same bytes, moments and seconds as stage by stage, to the last bit."""

from dataclasses import replace

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Profile, UniformStages
from tapestream.planners import planners
from tapestream.simulate.judge import Judge


def judged(schedule, profile, at_once):
    judge = Judge(schedule, profile, None)
    judge.at_once = at_once and judge.at_once
    judge.run()
    memory, clock = judge.memory, judge.clock
    return memory.peak, memory.peak_position, memory.peak_stage, clock.now, clock.compute_seconds, judge.forwards


@pytest.mark.parametrize("planner", ["periodic", "revolve", "least_peak", "rotor"])
@settings(max_examples=100, deadline=None)
@given(profile=chains(most=30), slots=st.integers(1, 3))
def test_unequal_stages(planner, profile, slots):
    tenths = tuple(replace(cost, forward_seconds=cost.forward_seconds / 10) for cost in profile.stages)
    profile = replace(profile, stages=tenths)
    knobs = {"revolve": {"slots": slots}, "periodic": {"segments": min(slots, len(profile))}}
    schedule = planners[planner](profile, None, **knobs.get(planner, {}))
    assert judged(schedule, profile, True) == judged(schedule, profile, False)


@given(profile=chains(), n=st.integers(1, 60), slots=st.integers(1, 5))
def test_equal_stages_have_the_same_bytes(profile, n, slots):
    """Their seconds are multiplied and not added up."""
    equal = Profile(UniformStages(profile.stages[0], n), profile.initial_nbytes, profile.blocks)
    schedule = planners["revolve"](equal, slots=slots)
    ours, theirs = judged(schedule, equal, True), judged(schedule, equal, False)
    assert ours[:3] + ours[5:] == theirs[:3] + theirs[5:]
    assert ours[3:5] == pytest.approx(theirs[3:5])
