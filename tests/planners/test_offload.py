"""Offload alone: every state away and back, overlapped; valid and within every budget."""

from itertools import pairwise

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import machine

from tapestream.costs import Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Offload, Prefetch, Record, Tier, Wait, distinct_nodes
from tapestream.planners import planners
from tapestream.simulate import simulate

plan = planners["offload"]


@pytest.mark.parametrize("n", [1, 2, 3, 9, 30])
@pytest.mark.parametrize("tail", [1, 2, 7, 30])
@pytest.mark.parametrize("ahead", [0, 1, 2, 5, 40])
def test_every_state_before_the_tail_moves_once_each_way(n, tail, ahead):
    profile = Profile.uniform(n)
    schedule = plan(profile, tail=tail, ahead=ahead)
    judged = simulate(schedule, profile, machine((1,), (1,)))
    before = max(0, n - tail)
    assert [a.value.index for a in schedule if isinstance(a, Offload)] == list(range(before))
    assert [a.value.index for a in schedule if isinstance(a, Prefetch)] == list(range(before))[::-1]
    assert judged.forwards == n + before
    assert judged.peak_nbytes[Tier.HOST] == before == judged.bytes_moved.get((Tier.HOST, Tier.DEVICE), 0)


def test_device_memory_does_not_grow_with_the_chain():
    for ahead in (0, 1, 3):
        peaks = {
            simulate(plan(Profile.uniform(n), tail=1, ahead=ahead), Profile.uniform(n)).peak_nbytes[Tier.DEVICE]
            for n in (20, 50, 400)
        }
        assert len(peaks) == 1
        assert peaks.pop() <= 5 + ahead


def test_copies_hide_behind_computation_where_they_can():
    profile, links = Profile.uniform(50), machine((0.9,), (1.8,))
    hidden = simulate(plan(profile, tail=4, ahead=1), profile, links)
    waited = simulate(plan(profile, tail=4, ahead=0), profile, links)
    assert hidden.stall_seconds < 1  # only the first copy in, behind one backward
    assert waited.stall_seconds > 40 * (0.9 + 1.8)
    schedule = plan(profile, tail=4, ahead=1)
    actions = list(schedule)
    for at, action in enumerate(actions):
        if isinstance(action, (Offload, Prefetch)):
            until = next(i for i in range(at, len(actions)) if actions[i] == Wait(action.value, action.target))
            assert any(isinstance(between, (Forward, Record)) for between in actions[at:until]) or until - at < 4


def test_more_copies_on_their_way_help_uneven_stages():
    """Large and small states in turn: with one copy on its way a large one is waited for."""
    stages = tuple(StageCost(1.0, 1.0, 3 if k % 2 else 1, 1) for k in range(40))
    profile, links = Profile(stages, 1), machine((0.5,), (0.5,))
    one, two = (simulate(plan(profile, tail=1, ahead=d), profile, links).stall_seconds for d in (1, 2))
    assert two < one


def least_device(profile, host, links):
    """The least device budget by the planner's own word (a profile may need no byte at all)."""
    try:
        plan(profile, Budget(1, host=host), links)
    except BudgetError as error:
        return error.least_nbytes
    return 1


@settings(max_examples=70, deadline=None)
@given(
    profile=chains(most=14), share=st.floats(0.1, 1.1), host=st.none() | st.integers(0, 40),
    write=st.integers(0, 3), read=st.integers(0, 3),
)  # fmt: skip
def test_valid_within_every_tier_and_more_is_never_slower(profile, share, host, write, read):
    links = machine((write,), (read,))
    full = simulate(planners["store_all"](profile), profile)
    device = max(1, round(full.peak_nbytes[Tier.DEVICE] * share))
    least = least_device(profile, host, links)
    if least > 1:
        with pytest.raises(BudgetError):
            plan(profile, Budget(least - 1, host=host), links)
    device = max(device, least)
    seconds = []
    for more in (0, 1, 6, 30, 10**6):
        budget = Budget(device + more, host=None if host is None else host + more)
        judged = simulate(plan(profile, budget, links), profile, links, budget)
        assert judged.recorded == len(profile) or judged.forwards > len(profile)
        seconds.append(judged.makespan_seconds)
    assert all(more <= less for less, more in pairwise(seconds))
    assert seconds[-1] == full.makespan_seconds


def test_long_chains_stay_small():
    schedule = plan(Profile.uniform(1_000_000), tail=1000, ahead=4)
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 60
    assert schedule.size > 10_000_000


def test_a_full_tier_is_named():
    with pytest.raises(BudgetError, match="a HOST budget of 3 B"):
        plan(Profile.uniform(30), Budget(12, host=3), machine((1,), (1,)), tail=2)


def test_bad_input():
    profile, links = Profile.uniform(9), machine((2,), (2,))
    for bad in (-1, 1.5, True, "2"):
        with pytest.raises(InputError, match="ahead must be a whole number of at least 0, not"):
            plan(profile, None, links, ahead=bad)
    with pytest.raises(InputError, match="tail must be a whole number of at least 1, not 0"):
        plan(profile, None, links, tail=0)
    with pytest.raises(InputError, match="'host' or 'disk', not 'cloud'"):
        plan(profile, None, links, tier="cloud")
    with pytest.raises(InputError, match="no link from DEVICE to HOST"):
        plan(profile, None, Machine())
    through = Machine({
        pair: Link(1.0) for a in (Tier.DEVICE, Tier.DISK) for pair in ((a, Tier.HOST), (Tier.HOST, a))
    })  # fmt: skip
    with pytest.raises(InputError, match=r"DISK is reached by way of HOST.*use tier='host'"):
        plan(profile, None, through, tier="disk")
