"""Runs of unknown length: valid at every length, slots, levels, close to what the length would have bought."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Free, Keep, Tier
from tapestream.planners import planners
from tapestream.planners._recurrences import least_forwards, reach, repetitions
from tapestream.planners.online import RULES, Online
from tapestream.simulate import simulate


def steps(run, count):
    for _ in range(count):
        run.advance()
    return run


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 120), slots=st.integers(1, 9))
def test_valid_at_every_length_and_never_more_than_the_slots(rule, n, slots):
    run, kept = Online(slots, rule), set()
    for k in range(n):
        for action in run.advance():
            match action:
                case Keep(state):
                    assert state == k
                    kept.add(state)
                case Free(value):
                    kept.remove(value.index)
                case Forward(first, last):
                    assert (first, last) == (k, k + 1)
        assert set(run.kept) == kept
        assert len(kept) <= slots
        assert run.kept[0] == 0
    profile = Profile.uniform(n)
    judged = simulate(run.schedule(), profile)
    gaps = [b - a for a, b in pairwise((*run.kept, n))]
    assert judged.forwards == 2 * n + sum(least_forwards(gap, slots - i) for i, gap in enumerate(gaps))
    assert judged.peak_nbytes[Tier.DEVICE] <= slots + 5
    assert run.steps == n


def test_the_run_may_go_on_after_a_look():
    run = steps(Online(3), 20)
    before = list(run.schedule())
    assert list(run.schedule()) == before
    assert steps(run, 5).kept == steps(Online(3), 25).kept


def test_levels_of_wang_and_moin_by_hand():
    run = Online(3, "wang_moin")
    seen = []
    for _ in range(11):
        run.advance()
        seen.append(run.kept)
    assert seen[2:] == [
        (0, 1, 2),
        (0, 1, 3),
        (0, 3, 4),
        (0, 3, 5),
        (0, 3, 6),
        (0, 6, 7),
        (0, 6, 8),
        (0, 6, 9),
        (0, 6, 10),
    ]


@cache
def best(n, slots):
    """The least sum of P over all places of restart checkpoints that a run of n steps could have."""
    if n == 0 or slots == 1:
        return least_forwards(n, 1) if n else 0
    return min(least_forwards(gap, slots) + best(n - gap, slots - 1) for gap in range(1, n + 1))


@pytest.mark.parametrize(("rule", "most"), [("stumm_walther_1", 1.11), ("stumm_walther_2", 1.05), ("wang_moin", 1.21)])
def test_forwards_against_the_best_places(rule, most):
    for slots in (2, 3, 4, 6):
        run = Online(slots, rule)
        for n in range(1, min(reach(slots, 3), 90) + 1):
            run.advance()
            gaps = [b - a for a, b in pairwise((*run.kept, n))]
            forwards = 2 * n + sum(least_forwards(gap, slots - i) for i, gap in enumerate(gaps))
            assert 2 * n + best(n, slots) <= forwards <= most * (2 * n + best(n, slots))
            assert n > slots or forwards == 2 * n
            if rule == "stumm_walther_2" and slots <= 3 and n <= reach(slots, 2):
                assert forwards == 2 * n + best(n, slots)


@pytest.mark.parametrize("rule", RULES)
def test_repetitions_stay_low(rule):
    for slots in (3, 5, 8):
        for n in (10, 57, 200, 700):
            schedule = steps(Online(slots, rule), n).schedule()
            advanced = [0] * n
            for action in schedule:
                if isinstance(action, Forward):
                    for k in range(action.start, action.stop):
                        advanced[k] += 1
            assert max(advanced) <= repetitions(n, slots) + (2 if rule == "stumm_walther_2" else 1)


def test_better_rules_need_fewer_forwards_on_long_runs():
    found = {rule: simulate(planners["online"](Profile.uniform(600), slots=8, rule=rule), Profile.uniform(600)).forwards
             for rule in RULES}  # fmt: skip
    known = 600 + least_forwards(600, 8)
    assert known <= found["stumm_walther_2"] <= found["stumm_walther_1"] <= found["wang_moin"] <= 1.4 * known


def test_planner_chooses_by_budget_on_any_chain():
    chain = Profile(tuple(StageCost(float(k % 3), 1.0, 2 + k % 2, 5) for k in range(25)), 2)
    with pytest.raises(BudgetError) as caught:
        planners["online"](chain, 3)
    least = caught.value.least_nbytes
    found = [simulate(planners["online"](chain, least + more), chain).makespan_seconds for more in (0, 5, 20, 60)]
    assert all(a >= b for a, b in pairwise(found))


def test_bad_input():
    for slots in (0, -1, 2.5, True):
        with pytest.raises(InputError, match="slots must be a whole number of at least 1"):
            Online(slots)
    with pytest.raises(InputError, match="stumm_walther_1, stumm_walther_2, wang_moin, not 'best'"):
        Online(3, "best")
    with pytest.raises(InputError, match="no step has been made"):
        Online(3).backward()
