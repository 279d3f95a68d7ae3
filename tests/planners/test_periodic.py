"""Segments: counts, balance, choice by budget."""

from itertools import combinations, pairwise

import pytest

from tapestream.costs import Profile, StageCost
from tapestream.errors import InputError
from tapestream.ir import Forward, Keep, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.planners._fit import device_peak
from tapestream.planners.periodic import _tree
from tapestream.simulate import simulate

periodic = planners["periodic"]


def lengths(schedule):
    """Stages in each segment, from the forwards of the first sweep."""
    ends = [a.stop for a in schedule if isinstance(a, Forward)]
    return [b - a for a, b in zip([0, *ends], [*ends, schedule.stages], strict=True)]


@pytest.mark.parametrize(
    ("n", "segments", "expected"), [(12, 4, [3, 3, 3, 3]), (11, 4, [2, 3, 3, 3]), (5, 1, [5]), (3, 9, [1, 1, 1])]
)
def test_equal_counts_on_equal_stages(n, segments, expected):
    schedule = periodic(Profile.uniform(n), segments=segments)
    assert lengths(schedule) == expected
    judged = simulate(schedule, Profile.uniform(n))
    assert judged.forwards == 2 * n - expected[-1]
    assert sum(isinstance(a, Keep) for a in schedule) == len(expected) - 1


def test_slots_are_restart_checkpoints():
    profile = Profile.uniform(20)
    assert periodic(profile, slots=3) == periodic(profile, segments=4)
    with pytest.raises(InputError, match="leave one of them out"):
        periodic(profile, slots=3, segments=4)


def test_without_anything_about_the_root():
    assert len(lengths(periodic(Profile.uniform(100)))) == 10


def test_budget_takes_the_fewest_segments_that_fit():
    profile = Profile.uniform(30, state_nbytes=2, saved_nbytes=10)
    peaks = {m: simulate(periodic(profile, segments=m), profile).peak_nbytes[Tier.DEVICE] for m in range(1, 31)}
    for budget in sorted(set(peaks.values())):
        fewest = min(m for m, peak in peaks.items() if peak <= budget)
        assert simulate(periodic(profile, budget), profile).forwards == 60 - -(-30 // fewest)


def test_unequal_stages_are_balanced_by_bytes():
    sizes = [64, 64, 16, 64, 64, 16, 32, 32, 8, 32, 32, 8]
    profile = Profile(tuple(StageCost(1.0, 1.0, size, 3 * size) for size in sizes), 64)
    for segments in (2, 3, 4):
        found = simulate(periodic(profile, segments=segments), profile).peak_nbytes[Tier.DEVICE]
        everything = []
        for cuts in combinations(range(1, 12), segments - 1):
            ends = [0, *cuts, 12]
            everything.append(device_peak(_tree(12, [(b - a, 1) for a, b in pairwise(ends)]), profile))
        equal = device_peak(_tree(12, [(12 // segments, segments)]), profile)
        assert found < equal
        assert found <= 1.15 * min(everything)


def test_long_equal_chains_stay_small():
    schedule = periodic(Profile.uniform(1_000_003), 100_000)
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 60
