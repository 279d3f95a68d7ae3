"""What a planner's refusal leaves behind."""

import contextlib
import gc
import weakref

import pytest

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError
from tapestream.ir import Tier
from tapestream.planning.auto import make_plan

LINKS = Machine({(Tier.HOST, Tier.DEVICE): Link(40.0), (Tier.DEVICE, Tier.HOST): Link(40.0)})


class Something:
    """That a caller has in hand."""


def test_what_a_caller_holds_goes_with_the_call() -> None:
    """Errors that planners keep would hold the frames that they passed through, and those of all callers."""
    stages = tuple(StageCost(1.0, 2.0, 4, 10, block=k) for k in range(6))
    profile = Profile(stages, 4, tuple(BlockCost(20, 20) for _ in range(6)))

    def ask() -> "weakref.ref[Something]":
        held = Something()
        with contextlib.suppress(BudgetError):  # pytest.raises would hold the error
            make_plan(profile, Budget(90, host=30), LINKS, update="step", home=Tier.HOST)
            pytest.fail("it fits")
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
