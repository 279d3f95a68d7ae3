"""`join`: branches that meet in one turn, against exhaustive search, and what all its schedules promise."""

from itertools import pairwise

import pytest
from chains import chains
from exhaustive_join import least_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import BlockCost, Budget, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Tier
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.planning.compare import compare, trade_off
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate

join = planners["join"]


@st.composite
def joins(draw, lengths, carried=False):
    """Branches of at most so many stages each."""
    branches = [draw(chains(most=n, carried=carried)) for n in draw(st.sampled_from(lengths))]
    bare = [Profile(b.stages, b.initial_nbytes, carried=b.carried, outside_nbytes=b.outside_nbytes) for b in branches]
    turn = draw(st.sampled_from((0, 0, 8)))
    return Profile.join(bare, turn_nbytes=turn, turn_seconds=draw(st.integers(0, 5).map(float)))


def peak_of(schedule, profile):
    return simulate(schedule, profile).peak_nbytes[Tier.DEVICE]


@pytest.mark.parametrize("order", ["free", "both"])
@settings(max_examples=15, deadline=None)
@given(profile=joins([(2, 2), (1, 2), (2, 1), (1, 1, 1)]), share=st.floats(0.2, 1.0))
def test_equal_to_exhaustive_search(order, profile, share):
    against_exhaustive_search(order, profile, share)


@pytest.mark.full
@pytest.mark.parametrize("order", ["free", "both"])
@settings(max_examples=150, deadline=None)
@given(profile=joins([(2, 2), (3, 2), (2, 3), (1, 1, 2)]), share=st.floats(0.2, 1.0))
def test_equal_to_exhaustive_search_on_longer_branches(order, profile, share):
    against_exhaustive_search(order, profile, share)


def against_exhaustive_search(order, profile, share):
    budget = max(1, round(peak_of(join(profile), profile) * share))
    truth = least_seconds(profile, budget, order)
    if truth is not None:
        schedule = join(profile, budget, in_order=order)
        assert simulate(schedule, profile, None, Budget(budget)).makespan_seconds == truth
        return
    with pytest.raises(BudgetError) as caught:
        join(profile, budget, in_order=order)
    least = caught.value.least_nbytes
    assert least_seconds(profile, least - 1, order) is None
    assert least_seconds(profile, least, order) is not None


@pytest.mark.parametrize("order", ["free", "sweep", "both"])
@settings(max_examples=12, deadline=None)
@given(profile=joins([(6, 6), (9, 2), (1, 8), (4, 3, 4), (2, 2, 2, 2)], carried=True), share=st.floats(0.1, 1.0))
def test_within_the_budget_and_never_slower_with_more(order, profile, share):
    full = simulate(join(profile), profile)
    budget = max(1, round(full.peak_nbytes[Tier.DEVICE] * share))
    least = least_of(profile, order)
    if budget < least:
        with pytest.raises(BudgetError) as caught:
            join(profile, budget, in_order=order)
        assert caught.value.least_nbytes == least
        budget = least
    seconds = []
    for more in (0, 1, 5, 40):
        judged = simulate(join(profile, budget + more, in_order=order), profile, None, Budget(budget + more))
        assert judged.backwards == judged.recorded == profile.runs
        seconds.append(judged.makespan_seconds)
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] >= full.makespan_seconds


def least_of(profile, order):
    """The least budget by the planner's own word (a profile may need no byte at all)."""
    try:
        return peak_of(join(profile, 1, in_order=order), profile)
    except BudgetError as error:
        return error.least_nbytes


@settings(max_examples=12, deadline=None)
@given(profile=joins([(5, 5), (3, 2, 3)]), share=st.floats(0.2, 1.0))
def test_more_freedom_is_never_slower(profile, share):
    budget = max(1, least_of(profile, "both"), round(peak_of(join(profile), profile) * share))
    free, sweep, both = (
        simulate(join(profile, budget, in_order=order), profile).makespan_seconds for order in ("free", "sweep", "both")
    )
    assert free <= sweep <= both


@settings(max_examples=12, deadline=None)
@given(profile=chains(most=8), share=st.floats(0.3, 1.0))
def test_one_branch_is_a_chain(profile, share):
    one = Profile.join([profile.branches[0]])
    assert not one.ends
    least = peak_of(planners["rotor"](one, max(1, least_of(one, "sweep"))), one)
    budget = max(1, least, round(peak_of(join(one), one) * share))
    schedule = join(one, budget)
    assert list(schedule) == list(planners["rotor"](one, budget))
    assert schedule.planner == "join"


def test_equal_branches_of_equal_stages_need_as_many_forwards_as_one_chain_at_best():
    """Six stages in two branches against the same six in a row: the bytes beside the slots are another state and
    cotangent, and then the forwards are the same, since what is kept may lie in either branch."""
    stages = (StageCost(1.0, 1.0, 4, 1),) * 6
    for budget in range(25, 60):
        row = simulate(planners["rotor"](Profile(stages, 4), budget), Profile(stages, 4)).forwards
        two = Profile.join([Profile(stages[:3], 4)] * 2)
        assert simulate(join(two, budget + 8), two).forwards <= row


def test_both_towers_share_the_memory():
    """A tower of wide states beside one of narrow ones: what is stored are the narrow ones, wherever that tower is."""
    wide = Profile((StageCost(1.0, 1.0, 100, 100),) * 6, 0)
    narrow = Profile((StageCost(1.0, 1.0, 1, 1),) * 6, 0)
    for branches in ([wide, narrow], [narrow, wide]):
        profile = Profile.join(branches)
        full = simulate(join(profile), profile)
        budget = full.peak_nbytes[Tier.DEVICE] - 300
        schedule = join(profile, budget)
        first = profile.spans[branches.index(narrow)][0]
        runs = [action for action in schedule if isinstance(action, Forward) and first <= action.start < first + 6]
        assert not runs
        assert simulate(schedule, profile, None, Budget(budget)).forwards < 12 + 6


@pytest.mark.full
def test_long_branches_are_cut_into_runs():
    short = Profile(tuple(StageCost(1.0 + k % 3, 2.0, 5 + k % 4, 20 + k % 7) for k in range(100)), 5)
    profile = Profile.join([short, Profile(short.stages[:30], 5), Profile(short.stages[:70], 5)])
    full = simulate(join(profile), profile)
    seconds = []
    for share in (0.05, 0.1, 0.4):
        budget = int(full.peak_nbytes[Tier.DEVICE] * share)
        judged = simulate(join(profile, budget, memory_steps=40), profile, None, Budget(budget))
        assert judged.backwards == profile.runs == 200
        seconds.append(judged.makespan_seconds / full.makespan_seconds)
    assert 1.7 > seconds[0] > seconds[1] > seconds[2] > 1


def test_what_is_no_join_is_named():
    chain = Profile.uniform(3)
    profile = Profile.join([chain, chain])
    with pytest.raises(InputError, match="planner 'rotor' is for a chain, and here 2 branches meet; use 'join'"):
        planners["rotor"](profile, 40)
    with pytest.raises(InputError, match="in_order is one of free, sweep, both, not 'all'"):
        join(profile, 40, in_order="all")
    with pytest.raises(InputError, match="memory_steps must be a whole number"):
        join(profile, 40, memory_steps=0)
    with pytest.raises(InputError, match="at least one branch"):
        Profile.join([])
    with pytest.raises(InputError, match="without any stage"):
        Profile(chain.stages[:2], 1, ends=(1,))
    blocked = Profile((StageCost(1.0, 1.0, 1, 1, block=0),), 1, blocks=(BlockCost(4),))
    for bad in (blocked, profile, Profile(chain.stages, 1, turn_nbytes=3)):
        with pytest.raises(InputError, match="branch 1 must be a chain"):
            Profile.join([chain, bad])


def test_plans_of_joins_are_made_compared_and_saved(tmp_path):
    profile = Profile.join([Profile.uniform(6, state_nbytes=3), Profile.uniform(4, state_nbytes=5)], turn_seconds=2.0)
    plan = make_plan(profile, 50)
    assert plan.planner == "join"
    assert f"{plan.simulation.forwards} for 10 stages" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again.schedule == plan.schedule
    assert again.profile == profile
    found = compare(profile, 50)
    assert [one.planner for one in found if one.applies] == ["join"]
    assert set(trade_off(profile, points=3)) == {"join"}
