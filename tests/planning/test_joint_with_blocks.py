"""`joint` where parameter blocks come and go: never slower than those that compete, whatever is fitted in later."""

from random import Random

import pytest
from competing import COMPETING

from tapestream.costs import BlockCost, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Tier
from tapestream.planning.auto import make_plan

LINKS = Machine({(Tier.HOST, Tier.DEVICE): Link(40.0), (Tier.DEVICE, Tier.HOST): Link(40.0)})


def streamed(random: Random, n: int) -> Profile:
    """``n`` stages, each with a block of its own."""
    size = random.randint
    stages = [
        StageCost(
            float(size(1, 4)), float(size(2, 6)), size(2, 6), size(4, 16), block=k, backward_extra_nbytes=size(0, 4)
        )
        for k in range(n)
    ]
    blocks = [BlockCost(weight := size(10, 60), gradient_nbytes=weight) for _ in range(n)]
    return Profile(tuple(stages), size(1, 6), tuple(blocks))


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.full), 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))]
)
def test_no_planner_is_faster(seed: int) -> None:
    random = Random(seed)
    profile = streamed(random, random.randint(4, 9))
    how = {"machine": LINKS, "update": "step", "home": Tier.HOST}
    most = make_plan(profile, planner="store_all", **how).peak_nbytes
    compared = 0
    for share in (0.45, 0.7):
        budget = round(share * most)
        try:
            found = make_plan(profile, budget, planner="joint", **how)
        except BudgetError:
            continue
        assert found.planner == "joint"
        assert found.peak_nbytes <= budget
        for name in COMPETING:
            try:
                other = make_plan(profile, budget, planner=name, **how)
            except (BudgetError, InputError):
                continue
            compared += 1
            assert found.seconds <= other.seconds, name
    assert compared >= 10
