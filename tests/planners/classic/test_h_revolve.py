"""Levels with slots each: published makespans, all schedules, budgets of every tier."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots_search import least_seconds
from tiers import PUBLISHED, busy, chain, machine

from tapestream.costs import Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.simulate import simulate

h_revolve = planners["h_revolve"]


def seconds(profile, links, **knobs):
    return simulate(h_revolve(profile, None, links, **knobs), profile, links).makespan_seconds


@pytest.mark.parametrize("key", PUBLISHED["hrevolve"])
def test_published_makespans(key):
    n, c, w, r, uf, ub = re.fullmatch(r"n=(\d+);c=\((.*)\);w=\((.*)\);r=\((.*)\);uf=(\d+);ub=(\d+)", key).groups()
    counts, write, read = (tuple(map(int, text.split(","))) for text in (c, w, r))
    links = machine(write[1:], read[1:])
    for those in (links, busy(links)):
        found = seconds(chain(int(n), float(uf), float(ub)), those, slots=counts)
        assert found == pytest.approx(PUBLISHED["hrevolve"][key], abs=1e-9)


def test_published_row_of_slow_forwards():
    links = machine((2,), (2,))
    found = [seconds(chain(n, 5.0, 1.0), links, slots=(3, 3)) for n in (10, 20, 50, 100)]
    assert found == [82, 192, 650, 1558]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6), slots=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    write=st.integers(1, 4), read=st.integers(1, 4), forward=st.integers(1, 5),
)  # fmt: skip
def test_equal_to_all_schedules(n, slots, write, read, forward):
    truth = least_seconds(n, slots[0], slots[1], forward=forward, write=write, read=read)
    found = seconds(chain(n, float(forward), 1.0), machine((write,), (read,)), slots=slots)
    assert found == pytest.approx(truth, abs=1e-9)


def test_a_third_tier_and_a_way_through_another():
    profile = chain(60, 2.0, 1.0)
    direct = machine((1, 6), (1, 6))
    two, three = seconds(profile, direct, slots=(2, 2)), seconds(profile, direct, slots=(2, 2, 4))
    assert three < two
    links = {pair: link for pair, link in direct.links.items() if Tier.DISK not in pair}
    links[Tier.HOST, Tier.DISK] = links[Tier.DISK, Tier.HOST] = Link(1 / 5)
    through = Machine(links)
    judged = simulate(h_revolve(profile, None, through, slots=(2, 2, 4)), profile, through)
    assert judged.makespan_seconds == pytest.approx(three)
    assert judged.peak_nbytes[Tier.HOST] <= 3
    assert judged.peak_nbytes[Tier.DISK] <= 4


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40), device=st.integers(8, 60), host=st.integers(0, 60), disk=st.integers(0, 60),
    state=st.integers(1, 5), saved=st.integers(0, 9), extra=st.integers(0, 4),
)  # fmt: skip
def test_valid_within_every_budget_and_more_is_never_slower(n, device, host, disk, state, saved, extra):
    profile = Profile.uniform(n, state_nbytes=state, saved_nbytes=saved)
    profile = Profile(profile.stages, state, turn_nbytes=extra, outside_nbytes=extra)
    links = machine((3, 7), (2, 9))
    try:
        h_revolve(profile, Budget(1, host=host, disk=disk), links)
    except BudgetError as error:
        device = max(device, error.least_nbytes)
    budgets = [
        Budget(device, host=host, disk=disk), Budget(device + 7, host=host, disk=disk),
        Budget(device + 7, host=host + 9, disk=disk), Budget(device + 7, host=host + 9, disk=disk + 9),
    ]  # fmt: skip
    found = [simulate(h_revolve(profile, b, links), profile, links, b).makespan_seconds for b in budgets]
    assert all(more <= less + 1e-9 for less, more in pairwise(found))


def test_transfers_that_cost_nothing_make_slots_of_all_tiers_equal():
    profile = chain(30)
    judged = simulate(h_revolve(profile, slots=(1, 4)), profile)
    assert judged.makespan_seconds == least_seconds_by_revolve(30, 5)


def least_seconds_by_revolve(n, slots):
    return simulate(planners["revolve"](chain(n), slots=slots), chain(n)).makespan_seconds


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"slots": (3, 0)}, r"slots\[1\] must be a whole number of at least 1, not 0"),
        ({"slots": (-1, 2)}, r"slots\[0\] must be"),
        ({"slots": (3, 3, 3, 3)}, "3 were given"),
        ({"slots": (3,), "tiers": ("host",)}, "0 were given for the slower tiers"),
        ({"slots": (3, 3), "tiers": ("tape",)}, "a slower tier is 'host' or 'disk', not 'tape'"),
        ({"slots": (3, 3), "tiers": (Tier.DEVICE,)}, "a slower tier is"),
        ({"slots": (3, 3, 3), "tiers": ("disk", "host")}, "fastest first"),
    ],
)
def test_bad_knobs(knobs, says):
    with pytest.raises(InputError, match=says):
        h_revolve(Profile.uniform(9), None, machine((1, 2), (1, 2)), **knobs)


def test_bad_costs_chains_and_links():
    links = machine((2,), (2,))
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(InputError, match="forward_seconds must be at least 0"):
            chain(9, bad)
        with pytest.raises(InputError, match="bytes_per_second must be positive"):
            Link(bad)
    with pytest.raises(InputError, match="no link from HOST to DISK"):
        h_revolve(chain(9), None, links, slots=(1, 1), tiers=("disk",))
    with pytest.raises(InputError, match=r"is for equal stages .* use planner 'rotor'"):
        h_revolve(Profile((StageCost(1.0, 1.0, 1, 2), StageCost(1.0, 1.0, 1, 1)), 1), None, links)
    with pytest.raises(InputError, match="use planner 'periodic_disk_revolve'"):
        h_revolve(chain(30_000), None, links, slots=(1, 1))


def test_a_budget_under_the_minimum_names_it():
    profile = chain(9)
    with pytest.raises(BudgetError, match=r"a DEVICE budget of 3 B .* give at least 6 bytes") as caught:
        h_revolve(profile, 3, machine((2,), (2,)))
    least = caught.value.least_nbytes
    assert simulate(h_revolve(profile, least, machine((2,), (2,))), profile).peak_nbytes[Tier.DEVICE] <= least
    with pytest.raises(BudgetError, match=r"a HOST budget of 2 B .* give at least 4 bytes") as caught:
        h_revolve(profile, Budget(host=2), machine((2,), (2,)), slots=(3, 4))
    assert caught.value.least_nbytes is None
