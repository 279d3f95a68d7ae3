"""Rotor against exhaustive search, and its groups of stages in long chains."""

from random import Random
from time import perf_counter

import numpy as np
import pytest
from chains import chains
from exhaustive import least_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Budget, Carried, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier, distinct_nodes
from tapestream.planners import _rotor_tables, planners
from tapestream.planners._recurrences import least_forwards
from tapestream.planners._rotor_tables import Fastest, Leanest, Scale
from tapestream.planners._units import Run, arrange
from tapestream.simulate import simulate

rotor = planners["rotor"]


def stored(profile):
    return simulate(planners["store_all"](profile), profile)


# The search grows eightfold with each stage, so one chain in six may have five.
MOSTLY_SHORT = st.integers(0, 5).flatmap(lambda k: chains(most=4 if k else 5, carried=False))


@settings(max_examples=80, deadline=None)
@given(profile=MOSTLY_SHORT, share=st.floats(0.2, 1.0))
def test_equal_to_exhaustive_search(profile, share):
    budget = max(1, round(stored(profile).peak_nbytes[Tier.DEVICE] * share))
    truth = least_seconds(profile, budget)
    if truth is not None:
        assert simulate(rotor(profile, budget), profile, None, Budget(budget)).makespan_seconds == truth
        return
    with pytest.raises(BudgetError) as caught:
        rotor(profile, budget)
    least = caught.value.least_nbytes
    assert least_seconds(profile, least - 1) is None
    assert least_seconds(profile, least) is not None


def test_grain_makes_large_sizes_exact():
    unit = 3 * 2**20
    small = Profile.uniform(9, state_nbytes=1, saved_nbytes=2)
    large = Profile.uniform(9, state_nbytes=unit, saved_nbytes=2 * unit)
    for budget in range(9, 32):
        few, many = rotor(small, budget), rotor(large, budget * unit)
        assert list(few) == list(many)


def test_coarse_steps_stay_within_the_budget_and_cost_time():
    chain = wild(40, Random(3))
    full = stored(chain)
    budget = full.peak_nbytes[Tier.DEVICE] // 4
    seconds = []
    for steps in (20, 100, 500, 2500):
        judged = simulate(rotor(chain, budget, memory_steps=steps), chain, None, Budget(budget))
        seconds.append(judged.makespan_seconds)
    assert seconds[0] >= seconds[1] >= seconds[2] >= seconds[3] > full.makespan_seconds
    with pytest.raises(InputError, match="memory_steps"):
        rotor(chain, budget, memory_steps=0)


def test_never_more_forwards_than_binomial_checkpointing():
    """With records no larger than a state, a slot's worth of bytes buys rotor at least what it buys revolve."""
    profile = Profile.uniform(24, state_nbytes=10, saved_nbytes=1)
    for slots in (2, 3, 5, 9):
        budget = simulate(planners["revolve"](profile, slots=slots), profile).peak_nbytes[Tier.DEVICE]
        assert simulate(rotor(profile, budget), profile).forwards <= 24 + least_forwards(24, slots)


def test_a_large_turn_is_passed_with_nothing_recorded():
    """The head needs 50 bytes: a tape of 30 bytes and the head exceed the budget together, but not in turn."""
    profile = Profile(tuple(StageCost(1.0, 1.0, 1, 14) for _ in range(2)), 1, turn_nbytes=50)
    judged = simulate(rotor(profile, 60), profile, None, Budget(60))
    assert judged.forwards == 4


def test_gradients_take_the_room_that_the_tape_leaves():
    """All 8 states and records fit at first, and all 8 gradients in the end, but not both at once."""
    profile = Profile(tuple(StageCost(1.0, 1.0, 10, 90, gradient_nbytes=80) for _ in range(8)), 10)
    full = stored(profile).peak_nbytes[Tier.DEVICE]
    assert full < 8 * (100 + 80)
    assert simulate(rotor(profile, full), profile).forwards == 8
    assert 8 < simulate(rotor(profile, full - 100), profile, None, Budget(full - 100)).forwards < 12


def wild(n, random, gradients=False):
    stage = lambda: StageCost(  # noqa: E731
        random.random(), random.random(), random.randint(1, 10**6), random.randint(1, 10**7),
        reads_output=random.random() < 0.2, forward_extra_nbytes=random.randint(0, 10**6),
        backward_extra_nbytes=random.randint(0, 10**6),
        gradient_nbytes=random.randint(0, 10**5) if gradients else 0,
    )  # fmt: skip
    return Profile(tuple(stage() for _ in range(n)), 10**6, turn_nbytes=10**6)


@pytest.mark.parametrize(
    ("n", "leanest", "gradients"),
    [
        (130, 0.04, False),
        pytest.param(700, 0.03, True, marks=pytest.mark.full),
        pytest.param(700, 0.02, False, marks=pytest.mark.full),
        pytest.param(130, 0.05, True, marks=pytest.mark.full),
    ],
)
def test_long_chains_in_groups(n, leanest, gradients):
    chain = wild(n, Random(n), gradients)
    full = stored(chain)
    slowest = full.makespan_seconds
    for share in (0.7, 0.1, leanest):
        budget = int(full.peak_nbytes[Tier.DEVICE] * share)
        seconds = simulate(rotor(chain, budget), chain, None, Budget(budget)).makespan_seconds
        assert slowest <= seconds <= 2.5 * full.makespan_seconds
        slowest = seconds
    with pytest.raises(BudgetError) as caught:
        rotor(chain, 10**6)
    least = caught.value.least_nbytes
    assert simulate(rotor(chain, least), chain).peak_nbytes[Tier.DEVICE] == least


def test_groups_cost_little():
    """Groups against every stage on its own, on a chain that both can treat."""
    chain = wild(60, Random(5))
    run, _ = Run.of(chain)
    for share in (0.4, 0.1):
        scale = Scale.of(int(stored(chain).peak_nbytes[Tier.DEVICE] * share), 300, 1)
        alone, grouped = (Fastest(arrange(run, 0, width, 6), scale).seconds for width in (60, 20))
        assert alone <= grouped <= 1.15 * alone


def test_equal_groups_are_solved_and_built_once():
    profile = Profile.uniform(20_000, state_nbytes=1000, saved_nbytes=7000)
    start = perf_counter()
    schedule = rotor(profile, 10_000_000)
    assert perf_counter() - start < 20
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 20_000
    judged = simulate(schedule, profile, None, Budget(10_000_000))
    assert 20_000 < judged.forwards < 60_000


def test_carried_storages_stay_within_the_budget():
    stages = tuple(StageCost(1.0, 1.0, 10, 30) for _ in range(12))
    chain = Profile(stages, 10, carried=(Carried(0, 12, 500), Carried(3, 7, 50)))
    full = stored(chain).peak_nbytes[Tier.DEVICE]
    budget = full - 100
    assert simulate(rotor(chain, budget), chain, None, Budget(budget)).forwards < 24


@given(
    runs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=5), gradients=st.booleans(),
    share=st.floats(0.1, 1.0),
)  # fmt: skip
def test_what_is_known_of_equal_units_is_what_would_be_found(
    runs: list[tuple[int, int]], gradients: bool, share: float
) -> None:
    """Problems that a problem one unit later has solved, against all solved by themselves."""
    kinds = wild(4, Random(3), gradients).stages
    run, _ = Run.of(Profile(tuple(kinds[kind] for kind, count in runs for _ in range(count)), 10**6))
    units = arrange(run, 10**6, 128, 24)
    scale = Scale.of(int(share * 2e7 * len(run)), 200, 1)
    quick = Fastest(units, scale), Leanest(units)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_rotor_tables, "_alike", lambda units: [1] * len(units))
        whole = Fastest(units, scale), Leanest(units)
    assert runs[0][1] <= 2 or gradients or max(quick[0]._alike) > 1  # the first input is of another size
    assert np.array_equal(quick[0]._seconds, whole[0]._seconds)
    assert np.array_equal(quick[1]._seconds, whole[1]._seconds)
    assert np.array_equal(quick[1]._nbytes, whole[1]._nbytes)
