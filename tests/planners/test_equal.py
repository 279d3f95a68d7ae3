"""Planners for equal stages: a first stage that needs less is no matter, other differences are named."""

import contextlib
from dataclasses import replace

import pytest
from competing import COMPETING
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import machine

from tapestream.costs import Budget, Carried, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.simulate import simulate

EQUAL = ("mixed", "h_revolve", "disk_revolve", "periodic_disk_revolve", "double", "async_multistage")
LINKS = machine((2, 3), (2, 3))
STAGE = StageCost(1.0, 2.0, 4, 8, forward_extra_nbytes=2, backward_extra_nbytes=3)


def with_first(first: StageCost, n: int, initial_nbytes: int = 0) -> Profile:
    return Profile((first, *[STAGE] * (n - 1)), initial_nbytes)


@st.composite
def with_less_at_first(draw):
    """A chain, and a budget in bytes."""
    initial, saved = draw(st.integers(0, 4)), draw(st.integers(0, 8))
    first = replace(
        STAGE,
        backward_seconds=draw(st.floats(0, 3)),
        saved_nbytes=saved,
        forward_extra_nbytes=draw(st.integers(0, 2)),
        backward_extra_nbytes=max(-saved - 4, draw(st.integers(-4, 3)) + 4 - initial),
    )
    profile = with_first(first, draw(st.integers(1, 24)), initial)
    stored = simulate(planners["store_all"](profile), profile).peak_nbytes[Tier.DEVICE]
    return profile, max(1, round(draw(st.floats(0.2, 1.1)) * stored))


@pytest.mark.parametrize("name", EQUAL)
@settings(max_examples=60, deadline=None)
@given(drawn=with_less_at_first())
def test_budgets_hold_where_the_first_stage_needs_less(name, drawn):
    profile, budget = drawn
    try:
        schedule = planners[name](profile, budget, LINKS)
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        budget = error.least_nbytes
        schedule = planners[name](profile, budget, LINKS)
    assert simulate(schedule, profile, LINKS, Budget(budget)).backwards == len(profile)


@settings(max_examples=20, deadline=None)
@given(drawn=with_less_at_first())
def test_joint_is_never_slower_where_the_first_stage_needs_less(drawn):
    profile, budget = drawn
    found = {}
    for name in ("joint", *(name for name in EQUAL if name in COMPETING)):
        with contextlib.suppress(BudgetError):
            schedule = planners[name](profile, budget, LINKS)
            found[name] = simulate(schedule, profile, LINKS, Budget(budget)).makespan_seconds
    assert not found or found["joint"] <= min(found.values())


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (with_first(replace(STAGE, saved_nbytes=9), 5), "stage 0 has saved_nbytes 9, stage 1 has 8"),
        (with_first(replace(STAGE, backward_extra_nbytes=8), 5), "stage 0 has backward_extra_nbytes 8"),
        (Profile((*[STAGE] * 4, replace(STAGE, forward_seconds=1.5)), 0), "stage 4 has forward_seconds 1.5,"),
        (Profile([STAGE] * 5, 5), "state 0 takes 5 bytes, the next 4"),
        (Profile([STAGE] * 5, 0, carried=(Carried(0, 3, 2),)), "1 storages pass through several states"),
    ],
)
def test_what_differs_is_named(name, profile, says):
    with pytest.raises(InputError, match=rf"{name} is for equal stages .*of these 5, {says}"):
        planners[name](profile, None, LINKS)
