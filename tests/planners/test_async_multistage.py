"""Copies behind computation: forwards, stalls, seconds per step at every length."""

import re
from itertools import pairwise, product
from math import ceil
from tracemalloc import get_traced_memory, start, stop

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import PUBLISHED, busy, machine

from tapestream.costs import Budget, Link, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Keep, Offload, Prefetch, Tier, Wait, distinct_nodes
from tapestream.planners import planners
from tapestream.planners.async_multistage import forwards, hiding
from tapestream.simulate import simulate

plan = planners["async_multistage"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("key", PUBLISHED["async_fwd"])
def test_forwards_are_the_published_ones_less_the_last_interval(key):
    n, interval, slots = map(int, re.fullmatch(r"n=(\d+);I=(\d+);s=(\d+)", key).groups())
    last = n - (ceil(n / interval) - 1) * interval
    judged = simulate(plan(Profile.uniform(n), slots=slots, interval=interval), Profile.uniform(n))
    assert judged.forwards == PUBLISHED["async_fwd"][key] - last == forwards(n, interval, slots)


def test_seconds_per_step_do_not_grow_and_those_of_revolve_do():
    links = machine((7.5,), (7.5,))
    for n in (1000, 2000, 10_000):
        each, alone = [], []
        for length in (n, 10 * n) if n == 1000 else (1000, n):
            profile = Profile.uniform(length)
            each.append(simulate(plan(profile, None, links, slots=5), profile, links).makespan_seconds / length)
            alone.append(simulate(planners["revolve"](profile, slots=5), profile).makespan_seconds / length)
        assert each[1] == pytest.approx(each[0], rel=0.05)
        assert alone[1] > 1.1 * alone[0]
        assert each[0] < alone[0]


@pytest.mark.parametrize(("write", "read", "slots"), [(7.5, 7.5, 5), (12, 3, 2), (40, 70, 8), (0.5, 0.25, 3)])
def test_no_stalls_with_the_interval_derived_and_some_with_half_of_it(write, read, slots):
    links, profile = machine((write,), (read,)), Profile.uniform(2000)
    schedule = plan(profile, None, links, slots=slots)
    judged = simulate(schedule, profile, links)
    assert judged.stall_seconds <= 0.05 * judged.compute_seconds
    derived = max(ceil(write), ceil(read / 2))
    starts = [a.stage for a in schedule if isinstance(a, (Keep, Offload)) and isinstance(a, Keep)]
    assert starts[1] - starts[0] >= derived
    if derived > 1:
        halved = simulate(plan(profile, None, links, slots=slots, interval=derived // 2), profile, links)
        assert halved.stall_seconds > 0.05 * halved.compute_seconds


@pytest.mark.thinned(9)
@pytest.mark.parametrize("n", [20, 60, 200])
@pytest.mark.parametrize(("write", "read"), [(0.25, 0.25), (1, 1), (3, 3), (7.5, 7.5), (30, 30), (20, 2), (2, 20)])
def test_hardly_slower_than_revolve_of_as_many_slots_or_offload_alone_in_as_many_bytes(n, write, read):
    links, profile = machine((write,), (read,)), Profile.uniform(n, backward_seconds=2.0, saved_nbytes=4)
    for slots, those in product((1, 3, 10), (links, busy(links))):
        judged = simulate(plan(profile, None, those, slots=slots), profile, those)
        revolve = simulate(planners["revolve"](profile, slots=slots), profile)
        assert judged.makespan_seconds <= 1.05 * revolve.makespan_seconds
        try:
            offload = planners["offload"](profile, judged.peak_nbytes[Tier.DEVICE], those)
        except BudgetError:
            continue
        assert judged.makespan_seconds <= 1.05 * simulate(offload, profile, those).makespan_seconds


def test_copies_start_early_and_are_waited_for_late():
    profile = Profile.uniform(60)
    actions = list(plan(profile, slots=2, interval=10))
    for at, action in enumerate(actions):
        if isinstance(action, (Offload, Prefetch)):
            until = next(i for i in range(at, len(actions)) if actions[i] == Wait(action.value, action.target))
            assert any(isinstance(between, Forward) for between in actions[at:until])
    assert sum(isinstance(action, Offload) for action in actions) == 4
    held = simulate(plan(profile, slots=2, interval=10), profile).peak_nbytes
    assert held[Tier.HOST] == 4


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 90), device=st.integers(5, 60), host=st.integers(0, 30), state=st.integers(1, 5),
    saved=st.integers(0, 9), write=st.integers(0, 9), read=st.integers(0, 9), reads_output=st.booleans(),
)  # fmt: skip
def test_valid_within_every_budget_and_more_is_never_slower(
    n, device, host, state, saved, write, read, reads_output
):  # fmt: skip
    cost = StageCost(1.0, 2.0, state, saved, reads_output=reads_output)
    profile = Profile(UniformStages(cost, n), state, turn_nbytes=3)
    links = machine((write,), (read,))
    try:
        plan(profile, 1, links)
    except BudgetError as error:
        device = max(device, error.least_nbytes)
    counted = []
    for more in (0, 4, 11, 40):
        budget = Budget(device + more, host=host + more)
        counted.append(simulate(plan(profile, budget, links), profile, links, budget).makespan_seconds)
    assert all(more <= less + 1e-9 for less, more in pairwise(counted))


def test_a_full_tier_makes_the_interval_longer():
    profile, links = Profile.uniform(1000), machine((3,), (3,))
    judged = simulate(plan(profile, Budget(None, host=10), links, slots=3), profile, links, Budget(None, host=10))
    assert judged.stall_seconds == 0
    assert 5 <= judged.peak_nbytes[Tier.HOST] <= 10


def test_a_million_stages():
    start()
    schedule = plan(Profile.uniform(1_000_000), None, machine((50.0,), (50.0,)), slots=6)
    assert next(iter(schedule))
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 1000
    assert get_traced_memory()[1] < 50e6
    stop()


def test_bytes_are_never_counted_too_low():
    cost = StageCost(1.0, 1.0, 4, 6, forward_extra_nbytes=5, backward_extra_nbytes=2, cotangent_nbytes=7)
    profile = Profile(UniformStages(cost, 50), 4, turn_nbytes=3, outside_nbytes=100)
    with pytest.raises(BudgetError, match="a DEVICE budget of 9 B") as caught:
        plan(profile, 9, machine((3,), (3,)))
    least = caught.value.least_nbytes
    peak = simulate(plan(profile, least, machine((3,), (3,))), profile).peak_nbytes[Tier.DEVICE]
    assert least - 3 * 4 - 7 - 5 <= peak <= least


def test_bad_input():
    profile, links = Profile.uniform(9), machine((2,), (2,))
    for knobs in ({"slots": 0}, {"interval": 0}, {"interval": -4}, {"slots": 1.5}):
        with pytest.raises(InputError, match="must be a whole number of at least 1"):
            plan(profile, None, links, **knobs)
    with pytest.raises(InputError, match="'host' or 'disk', not 'cloud'"):
        plan(profile, None, links, tier="cloud")
    through = Machine({
        pair: Link(1.0) for a in (Tier.DEVICE, Tier.DISK) for pair in ((a, Tier.HOST), (Tier.HOST, a))
    })  # fmt: skip
    with pytest.raises(InputError, match=r"DISK is reached by way of HOST, .* use tier='host' or planner 'h_revolve'"):
        plan(profile, None, through, tier="disk")
    with pytest.raises(InputError, match="use planner 'rotor'"):
        plan(Profile((StageCost(1.0, 1.0, 1, 2), StageCost(1.0, 1.0, 1, 1)), 1), None, links)
    with pytest.raises(BudgetError, match="a HOST budget of 1 B"):
        plan(Profile.uniform(90), Budget(host=1), links, slots=2, interval=4)


def test_free_compute_never_hides_a_copy():
    from tapestream.planners._tiers import Store

    store = Store((Tier.DEVICE, Tier.HOST), 2.0, 0.0)
    assert hiding(StageCost(0.0, 1.0, 1, 1), store) >= 10**15
    profile = Profile.uniform(20, forward_seconds=0.0)
    assert not any(isinstance(a, Offload) for a in plan(profile, None, machine((2,), (2,)), slots=3))
