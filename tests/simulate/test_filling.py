"""`simulate.filling`: what a tier holds at its peak adds up, and is what the judge holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import BlockCost, Link, Machine, Profile, StageCost
from tapestream.errors import Allowance, BudgetError
from tapestream.ir import Tier
from tapestream.planning.auto import make_plan
from tapestream.simulate.filling import UpTo

PLAIN = StageCost(1.0, 2.0, 100, 700, backward_extra_nbytes=30, cotangent_nbytes=100)
LINKS = Machine({(Tier.HOST, Tier.DEVICE): Link(1e3), (Tier.DEVICE, Tier.HOST): Link(1e3)})


def streamed(stages: int) -> Profile:
    cost = StageCost(1.0, 2.0, 100, 700, backward_extra_nbytes=30, cotangent_nbytes=100)
    each = tuple(
        StageCost(**{**{name: getattr(cost, name) for name in cost.__slots__}, "block": k}) for k in range(stages)
    )
    block = BlockCost(400, gradient_nbytes=400, optimizer_state_nbytes=800, update_seconds=0.5)
    return Profile(each, 100, (block,) * stages, outside_nbytes=50, turn_nbytes=2500, turn_seconds=0.5)


@settings(deadline=None)
@given(st.integers(2, 9), st.floats(0.0, 1.0), st.sampled_from(("step", "backward")))
def test_what_fills_a_device_adds_up(stages: int, share: float, update: str) -> None:
    profile = streamed(stages)
    try:
        most = make_plan(profile, None, LINKS, update=update).peak_nbytes
        plan = make_plan(profile, 1 + int(share * most), LINKS, update=update)
    except BudgetError as error:
        plan = make_plan(profile, error.least_nbytes, LINKS, update=update)
    fills = plan.fills
    assert sum(fills.values()) == plan.peak_nbytes
    assert fills["outside the blocks"] == 50
    assert list(fills.values()) == sorted(fills.values(), reverse=True)
    assert min(fills.values()) >= 0
    held = []

    class Held(UpTo):
        def _look(self) -> None:
            super()._look()
            held.append((self.found.total(), self.memory.nbytes[Tier.DEVICE]))

    Held(plan.schedule, profile, LINKS, plan.simulation.peak_position[Tier.DEVICE]).run()
    ((found, counted),) = held
    assert found == counted


def test_each_kind_by_hand() -> None:
    """Two stages with everything stored: at the turn, three states, what two stages saved, logits and a cotangent."""
    profile = Profile((PLAIN,) * 2, 100, turn_nbytes=1000, outside_nbytes=7)
    assert make_plan(profile, planner="store_all").fills == {
        "saved tensors": 1400, "logits and loss": 1100, "states": 300, "outside the blocks": 7,
    }  # fmt: skip


def test_a_refusal_says_what_fills_the_least() -> None:
    profile = Profile((PLAIN,) * 8, 100, turn_nbytes=5000)
    with pytest.raises(BudgetError) as told:
        make_plan(profile, 10)
    least = told.value.budgets[0]
    assert isinstance(least, Allowance)
    assert sum(nbytes for _, nbytes in least.fills) <= least.nbytes
    assert f"{least.nbytes} bytes are filled by" in str(told.value)
    assert "bytes of logits and loss" in str(told.value)
