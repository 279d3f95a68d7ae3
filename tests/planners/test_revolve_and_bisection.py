"""Binomial checkpointing and bisection against their published numbers."""

from functools import cache
from itertools import pairwise
from time import perf_counter

import pytest

from tapestream.costs import Profile
from tapestream.errors import InputError
from tapestream.ir import Forward, Free, Keep, Record, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.planners._recurrences import least_forwards, reach, repetitions
from tapestream.simulate import simulate


@cache
def dynamic(n, slots):
    """P(n, s) by its definition."""
    if n == 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(i + dynamic(i, slots) + dynamic(n - i, slots - 1) for i in range(1, n))


def runs(schedule, n):
    """How often each stage is advanced without saving, and the most restart checkpoints held at once."""
    advanced, kept, most = [0] * n, set(), 0
    for action in schedule:
        match action:
            case Forward(start, stop):
                for k in range(start, stop):
                    advanced[k] += 1
            case Keep(k):
                kept.add(k)
                most = max(most, len(kept))
            case Free(value):
                kept.remove(value.index)
    return advanced, most


def test_closed_form_is_the_recurrence_and_the_table(published):
    for n in range(1, 65):
        for slots in range(1, n + 2):
            assert least_forwards(n, slots) == dynamic(n, slots)
    for key, forwards in published["P"].items():
        n, slots = map(int, key.split(","))
        assert least_forwards(n, slots) == forwards


@pytest.mark.parametrize("n", [1, 2, 3, 5, 11, 33, 64])
def test_revolve_does_what_the_closed_form_says(n):
    profile = Profile.uniform(n)
    for slots in range(1, n + 2):
        schedule = planners["revolve"](profile, slots=slots)
        advanced, most = runs(schedule, n)
        used = min(slots, n)
        assert sum(advanced) == least_forwards(n, used)
        assert simulate(schedule, profile).forwards == n + sum(advanced)
        assert max(advanced) <= repetitions(n, used)
        assert most == min(slots, n - 1), "no slot is left over"


def test_long_chains_share_their_parts():
    n, slots = 250_000, 20
    start = perf_counter()
    schedule = planners["revolve"](Profile.uniform(n), slots=slots)
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 2000
    assert perf_counter() - start < 2
    assert simulate(schedule, Profile.uniform(n)).forwards == n + 1_453_990


@pytest.mark.parametrize("n", [3, 20, 64])
def test_without_slots_the_most_that_fit(n):
    profile = Profile.uniform(n, state_nbytes=7, saved_nbytes=11)
    peaks = [simulate(planners["revolve"](profile, slots=s), profile).peak_nbytes[Tier.DEVICE] for s in range(1, n + 1)]
    assert all(a <= b <= a + 7 for a, b in pairwise(peaks)), "the search over slots relies on it"
    for budget in sorted({peak + more for peak in peaks[:: max(1, n // 12)] for more in (0, 1, 6)}):
        slots = sum(peak <= budget for peak in peaks)
        found = simulate(planners["revolve"](profile, budget), profile)
        assert found.forwards == n + least_forwards(n, slots)


def test_bisection_table(published):
    for key, row in published["bisection"].items():
        n = int(key)
        profile = Profile.uniform(n)
        schedule = planners["bisection"](profile)
        assert simulate(schedule, profile).forwards == row["fwd"]
        if n <= 1024:
            # The table counts the state that a single stage is recorded from; here it is live, not kept.
            assert runs(schedule, n)[1] == row["slots_incl_x0"] - 1
        assert n + least_forwards(n, row["slots_incl_x0"]) == row["binomial_F_same_slots"]


@pytest.mark.parametrize("base_case", [1, 2, 3, 7, 50])
def test_bisection_base_case(base_case):
    def forwards(length):
        half = length // 2
        return length if length <= base_case else half + forwards(length - half) + forwards(half)

    profile = Profile.uniform(45)
    schedule = planners["bisection"](profile, base_case=base_case)
    assert simulate(schedule, profile).forwards == forwards(45)
    first = next(action for action in schedule if isinstance(action, (Keep, Record)))
    assert isinstance(first, Record) == (base_case >= 45)


@pytest.mark.parametrize(("name", "knob"), [("revolve", "slots"), ("bisection", "base_case"), ("periodic", "segments")])
@pytest.mark.parametrize("value", [0, -3, 2.5, True])
def test_knobs_out_of_range(name, knob, value):
    with pytest.raises(InputError, match=f"{knob} must be a whole number of at least 1"):
        planners[name](Profile.uniform(8), **{knob: value})


def test_binomial_numbers():
    assert [reach(3, t) for t in (-1, 0, 1, 2)] == [0, 1, 4, 10]
    assert repetitions(10, 3) == 2
    assert repetitions(11, 3) == 3
