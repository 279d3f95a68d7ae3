"""Remote and local restart checkpoints: forwards, bytes, choice by budget."""

from itertools import pairwise
from tracemalloc import get_traced_memory, start, stop

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import machine

from tapestream.costs import Budget, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Keep, Offload, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.simulate import simulate

double = planners["double"]


@pytest.mark.parametrize(("n", "interval", "segment"), [(60, 20, 5), (61, 20, 7), (5, 5, 2), (7, 1, 1), (1, 9, 9)])
def test_each_stage_runs_at_most_three_times(n, interval, segment):
    profile = Profile.uniform(n)
    schedule = double(profile, interval=interval, segment=segment)
    runs = [1] * n
    for action in schedule:
        if isinstance(action, Forward):
            for k in range(action.start, action.stop):
                runs[k] += 1
    assert max(runs) <= 3
    assert simulate(schedule, profile).forwards == sum(runs)
    kept = {action.stage for action in schedule if isinstance(action, Keep)}
    assert all(k % interval % segment == 0 for k in kept)
    away = [action.value.index for action in schedule if isinstance(action, Offload)]
    assert away == list(range(0, n, interval))[:-2]


def test_by_hand():
    profile = Profile.uniform(12)
    judged = simulate(double(profile, interval=6, segment=2), profile)
    assert judged.forwards == 6 + 4 + 6 + 4 + 6  # swept; the last interval laid, recorded; the first laid, recorded
    assert judged.peak_nbytes[Tier.HOST] == 0
    three = simulate(double(Profile.uniform(18), interval=6, segment=2), Profile.uniform(18))
    assert three.peak_nbytes[Tier.HOST] == 1


def test_without_anything_a_third_root():
    kept = [action.stage for action in double(Profile.uniform(1000)) if isinstance(action, Keep)]
    assert kept[:3] == [0, 100, 200]
    assert kept[-1] - kept[-2] == 10


def test_no_stalls_where_intervals_hide_copies():
    profile, links = Profile.uniform(400), machine((9,), (9,))
    assert simulate(double(profile, None, links, interval=10, segment=3), profile, links).stall_seconds == 0
    assert simulate(double(profile, None, links, interval=5, segment=3), profile, links).stall_seconds > 0


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 80), device=st.integers(5, 90), host=st.integers(0, 20), state=st.integers(1, 5),
    saved=st.integers(0, 9), reads_output=st.booleans(), extra=st.integers(0, 3),
)  # fmt: skip
def test_valid_within_every_budget_and_more_is_never_slower(n, device, host, state, saved, reads_output, extra):
    cost = StageCost(1.0, 2.0, state, saved, reads_output=reads_output, forward_extra_nbytes=extra)
    profile = Profile(UniformStages(cost, n), state)
    try:
        double(profile, Budget(1, host=host))
    except BudgetError as error:
        device = max(device, error.least_nbytes)
    counted = []
    for more in (0, 4, 11, 40):
        budget = Budget(device + more, host=host + more)
        counted.append(simulate(double(profile, budget), profile, None, budget).forwards)
    assert all(more <= less for less, more in pairwise(counted))


def test_a_million_stages():
    start()
    for budget in (None, 1000):
        schedule = double(Profile.uniform(1_000_000), budget, machine((50.0,), (50.0,)))
        assert next(iter(schedule))
        assert sum(1 for _ in distinct_nodes(schedule.root)) < 100
    assert get_traced_memory()[1] < 50e6
    stop()


def test_bad_input():
    profile = Profile.uniform(9)
    for knobs in ({"interval": 0}, {"segment": -1}, {"interval": 2.5}):
        with pytest.raises(InputError, match="must be a whole number of at least 1"):
            double(profile, **knobs)
    with pytest.raises(InputError, match="not 'moon'"):
        double(profile, tier="moon")
    with pytest.raises(InputError, match="use planner 'rotor'"):
        double(Profile((StageCost(1.0, 1.0, 1, 2), StageCost(1.0, 1.0, 1, 1)), 1))
    with pytest.raises(BudgetError, match="a DEVICE budget of 2 B") as caught:
        double(profile, 2)
    assert simulate(double(profile, caught.value.least_nbytes), profile).backwards == 9
