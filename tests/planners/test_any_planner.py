"""What all planners promise: valid schedules within the budget of every tier, and errors that name the value."""

from itertools import pairwise

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import machine

from tapestream.costs import Budget, Profile, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.simulate import simulate

MORE_IS_NEVER_SLOWER = [name for name in planners if name not in ("joint", "h_revolve")]
"""`joint` makes room by rules that depend on the budget; `h_revolve` waits for copies that the judge lets overlap."""
PLANNERS = list(planners)
LINKS = machine((1, 3), (2, 3))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "joint"])  # it has a test of its own
@settings(max_examples=20, deadline=None)
@given(
    profile=chains(most=9), equal=st.booleans(), share=st.floats(0.1, 1.1), host=st.sampled_from((None, 0, 3, 30)),
    disk=st.sampled_from((None, 0, 12)),
)  # fmt: skip
def test_valid_and_within_every_tier(name, profile, equal, share, host, disk):
    if equal:
        profile = Profile(UniformStages(profile.stages[0], 3 * len(profile)), profile.stages[0].output_nbytes)
    device = max(1, round(simulate(planners["store_all"](profile), profile).peak_nbytes[Tier.DEVICE] * share))
    seconds = []
    for more in (0, 5, 40):
        budget = Budget(device + more, host=host, disk=disk)
        try:
            schedule = planners[name](profile, budget, LINKS)
        except InputError:
            assert not equal
            return
        except BudgetError:
            assert not seconds or name not in MORE_IS_NEVER_SLOWER
            continue
        judged = simulate(schedule, profile, LINKS, budget)
        assert schedule.planner == name
        assert judged.backwards == len(profile)
        seconds.append(judged.makespan_seconds)
    if name in MORE_IS_NEVER_SLOWER:
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(seconds))


@pytest.mark.parametrize("name", PLANNERS)
def test_a_budget_of_one_byte_names_itself_and_what_works(name):
    profile = Profile.uniform(12, state_nbytes=10, saved_nbytes=30)
    with pytest.raises(BudgetError, match=r"1 B|1 bytes") as caught:
        planners[name](profile, 1, LINKS)
    least = caught.value.least_nbytes
    assert simulate(planners[name](profile, least, LINKS), profile, LINKS, Budget(least)).backwards == 12


@pytest.mark.parametrize("name", PLANNERS)
def test_what_is_not_known_is_named(name):
    profile = Profile.uniform(6)
    with pytest.raises(InputError, match=f"planner '{name}' has no knob 'size'"):
        planners[name](profile, None, LINKS, size=3)
    plan = planners[name].__wrapped__
    for knob in {"slots", "segments", "interval", "segment", "base_case", "tail", "memory_steps", "period"} & set(
        plan.__kwdefaults__ or {}
    ):
        zero = [0] if name == "h_revolve" else 0
        with pytest.raises(InputError, match=rf"{knob}.* must be a whole number of at least 1, not 0"):
            planners[name](profile, None, LINKS, **{knob: zero})
    if "tier" in (plan.__kwdefaults__ or {}):
        with pytest.raises(InputError, match="a slower tier is 'host' or 'disk', not 'tape'"):
            planners[name](profile, 40, LINKS, tier="tape")
    for budget in (-5, float("nan"), "much"):
        with pytest.raises(InputError, match=str(budget)):
            planners[name](profile, budget, LINKS)
