"""States or records in slots: the published numbers, all schedules, budgets."""

from itertools import pairwise

import pytest
from slots_search import least_seconds
from tiers import PUBLISHED

from tapestream.costs import Budget, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Backward, Free, Keep, Record, Tier
from tapestream.planners import planners
from tapestream.planners._recurrences import least_forwards
from tapestream.simulate import simulate

mixed = planners["mixed"]


def test_published_numbers():
    for key, forwards in PUBLISHED["mixed"].items():
        n, slots = map(int, key.split(","))
        assert simulate(mixed(Profile.uniform(n), slots=slots), Profile.uniform(n)).forwards == forwards


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_equal_to_all_schedules(slots):
    for n in range(1, 8):
        assert simulate(mixed(Profile.uniform(n), slots=slots), Profile.uniform(n)).forwards == least_seconds(
            n, slots, mixed=True
        )


@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 1), (9, 3), (25, 4), (60, 10), (12, 30)])
def test_slots_are_never_exceeded(n, slots):
    kept, taped, due = set(), set(), n - 1
    schedule = mixed(Profile.uniform(n), slots=slots)
    for action in schedule:
        match action:
            case Keep(k):
                kept.add(k)
            case Free(value):
                kept.remove(value.index)
            case Record(k):
                taped.add(k)
            case Backward(k):
                taped.remove(k)
                due = k - 1
        assert len(kept) + len(taped - {due}) <= slots
    assert simulate(schedule, Profile.uniform(n)).forwards <= n + least_forwards(n, min(n, slots))


def test_more_budget_is_never_slower():
    profile = Profile.uniform(30, state_nbytes=3, saved_nbytes=5)
    with pytest.raises(BudgetError) as caught:
        mixed(profile, 1)
    least = caught.value.least_nbytes
    seconds = []
    for budget in range(least, 300, 7):
        judged = simulate(mixed(profile, budget), profile, None, Budget(budget))
        seconds.append(judged.makespan_seconds)
    assert all(a >= b for a, b in pairwise(seconds))
    assert seconds[0] > seconds[-1] == 60
    assert simulate(mixed(profile, 300), profile).peak_nbytes[Tier.DEVICE] <= 300


@pytest.mark.parametrize("slots", [0, -2, 1.5, True])
def test_bad_slots(slots):
    with pytest.raises(InputError, match="slots must be a whole number"):
        mixed(Profile.uniform(9), slots=slots)


def test_refusals_say_what_to_do():
    with pytest.raises(InputError, match="use planner 'rotor'"):
        mixed(Profile((StageCost(1.0, 1.0, 1, 2), StageCost(1.0, 1.0, 1, 1)), 1), slots=1)
    with pytest.raises(InputError, match="use planner 'revolve', or at most 20 slots"):
        mixed(Profile.uniform(10_000), slots=21)
