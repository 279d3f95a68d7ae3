"""Binomial divide and conquer: the three rules, the table, the optimum."""

from itertools import pairwise
from math import comb
from tracemalloc import get_traced_memory, start, stop

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st
from slots_search import least_seconds

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Free, Keep, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.planners._recurrences import least_forwards
from tapestream.simulate import simulate

binomial = planners["binomial"]


def runs(schedule):
    """How often each stage is advanced without saving, and the most restart checkpoints held at once."""
    advanced, kept, most = [0] * schedule.stages, 0, 0
    for action in schedule:
        match action:
            case Forward(first, last):
                for k in range(first, last):
                    advanced[k] += 1
            case Keep():
                kept += 1
                most = max(most, kept)
            case Free():
                kept -= 1
    return advanced, most


@pytest.mark.parametrize("n", [1, 2, 3, 6, 10, 29, 64, 100])
def test_fixed_space_is_optimal_with_the_slots_given(n):
    profile = Profile.uniform(n)
    for slots in range(1, n + 1):
        advanced, most = runs(binomial(profile, slots=slots))
        assert sum(advanced) == least_forwards(n, slots)
        assert most <= slots


def test_the_optimum_is_that_of_all_schedules():
    for n in range(1, 8):
        for slots in (1, 2, 3):
            judged = simulate(binomial(Profile.uniform(n), slots=slots), Profile.uniform(n))
            assert judged.forwards == least_seconds(n, slots)


def test_same_slots_as_bisection(published):
    for key, row in published["bisection"].items():
        profile = Profile.uniform(int(key))
        judged = simulate(binomial(profile, slots=row["slots_incl_x0"]), profile)
        assert judged.forwards == row["binomial_F_same_slots"]


@pytest.mark.parametrize("times", [1, 2, 3, 5])
def test_fixed_time_takes_the_fewest_slots(times):
    for n in (1, 2, 5, 10, 35, 70):
        advanced, most = runs(binomial(Profile.uniform(n), rule="fixed_time", repetitions=times))
        assert max(advanced) <= times
        assert comb(most + times, times) >= n - 1


def test_logarithmic_grows_both():
    for n in (1, 2, 6, 7, 20, 71, 300):
        advanced, most = runs(binomial(Profile.uniform(n), rule="logarithmic"))
        both = max(most, *advanced) if n > 1 else 0
        assert n == 1 or comb(2 * both - 2, both - 1) < n <= comb(2 * both, both)


def test_budget_buys_slots_or_time():
    profile = Profile.uniform(40, state_nbytes=5, saved_nbytes=3)
    for rule in ("fixed_space", "fixed_time"):
        least = [simulate(binomial(profile, budget, rule=rule), profile).forwards for budget in range(60, 260, 10)]
        assert all(a >= b for a, b in pairwise(least))
        assert least[0] > least[-1] == 79


@pytest.mark.parametrize("rule", ["fixed_space", "fixed_time"])
@settings(max_examples=60, deadline=None)
@given(profile=chains(), share=st.floats(0.2, 1.1))
def test_any_chain_within_any_budget(rule, profile, share):
    full = simulate(planners["store_all"](profile), profile)
    budget = max(1, round(full.peak_nbytes[Tier.DEVICE] * share))
    try:
        binomial(profile, 1, rule=rule)
    except BudgetError as error:
        budget = max(budget, error.least_nbytes)
    judged = simulate(binomial(profile, budget, rule=rule), profile, None, Budget(budget))
    more = simulate(binomial(profile, budget + 5, rule=rule), profile)
    assert more.makespan_seconds <= judged.makespan_seconds


def test_a_million_stages():
    start()
    for knobs in ({"slots": 20}, {"rule": "logarithmic"}, {"rule": "fixed_time", "repetitions": 4}):
        schedule = binomial(Profile.uniform(1_000_000), **knobs)
        assert next(iter(schedule))
        assert sum(1 for _ in distinct_nodes(schedule.root)) < 10_000
    assert get_traced_memory()[1] < 50e6
    stop()


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"slots": 0}, "slots must be a whole number of at least 1, not 0"),
        ({"rule": "fixed_time", "repetitions": -1}, "repetitions must be .* not -1"),
        ({"rule": "fastest"}, "fixed_space, fixed_time, logarithmic, not 'fastest'"),
        ({"rule": "logarithmic", "slots": 3}, "leave slots=3 out"),
        ({"repetitions": 3}, "'fixed_space' finds repetitions itself"),
    ],
)
def test_bad_knobs(knobs, says):
    with pytest.raises(InputError, match=says):
        binomial(Profile.uniform(9), **knobs)
