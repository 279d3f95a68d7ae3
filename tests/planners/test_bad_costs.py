"""Wrong costs never reach a planner: whoever makes them is told which figure is wrong, and what it was."""

import re
from math import inf, nan

import pytest

from tapestream.costs import BlockCost, Budget, Carried, Link, Machine, Profile, StageCost, UniformStages
from tapestream.costs.rates import Rates
from tapestream.errors import InputError
from tapestream.ir import Tier
from tapestream.planners import planners

STAGE = {"forward_seconds": 1.0, "backward_seconds": 1.0, "output_nbytes": 1, "saved_nbytes": 1}
NO_NUMBER = (-1.0, nan, inf, "3", True, [1])
NO_BYTES = (*NO_NUMBER, 1.5)
RATES = {"flops_per_second": 1.0, "memory_bytes_per_second": 1.0, "launch_seconds": 1.0}
NAMES = list(planners)
COUNTS = {"slots", "segments", "interval", "segment", "base_case", "tail", "memory_steps", "period"}
MOVING = [name for name in NAMES if "tier" in (planners[name].__wrapped__.__kwdefaults__ or {})]


def refuses(make, name, bad):
    with pytest.raises(InputError, match=rf"{name} must be .*, not {re.escape(repr(bad))}"):
        make(**{name: bad})


@pytest.mark.parametrize("bad", NO_NUMBER, ids=repr)
def test_seconds_and_speeds(bad):
    for name in ("forward_seconds", "backward_seconds", "record_seconds"):
        refuses(lambda **more: StageCost(**{**STAGE, **more}), name, bad)
    refuses(lambda **more: Profile((StageCost(**STAGE),), 1, **more), "turn_seconds", bad)
    refuses(lambda **more: BlockCost(1, **more), "update_seconds", bad)
    for name in ("bytes_per_second", "latency_seconds", "busy_seconds", "mixed_bytes_per_second"):
        refuses(lambda **more: Link(**{"bytes_per_second": 1.0, **more}), name, bad)
    for name in ("flops_per_second", "memory_bytes_per_second", "launch_seconds"):
        refuses(Machine, name, bad)
        refuses(lambda **more: Rates(**{**RATES, **more}), name, bad)


@pytest.mark.parametrize("bad", NO_BYTES, ids=repr)
def test_bytes_and_numbers(bad):
    for name in ("output_nbytes", "saved_nbytes", "forward_extra_nbytes", "backward_extra_nbytes", "cotangent_nbytes",
                 "record_extra_nbytes", "gradient_nbytes", "block"):  # fmt: skip
        if (name, bad) != ("backward_extra_nbytes", -1.0):
            refuses(lambda **more: StageCost(**{**STAGE, **more}), name, bad)
    for name in ("initial_nbytes", "outside_nbytes", "turn_nbytes"):
        refuses(lambda **more: Profile(**{"stages": (StageCost(**STAGE),), "initial_nbytes": 1, **more}), name, bad)
    for name in ("parameters", "gradient", "optimizer_state", "buffers", "update_extra"):
        refuses(lambda **more: BlockCost(**{"parameters_nbytes": 1, **more}), f"{name}_nbytes", bad)
    for name in ("first", "last", "nbytes"):
        refuses(lambda **more: Carried(**{"first": 0, "last": 3, "nbytes": 1, **more}), name, bad)
    with pytest.raises(InputError, match=r"state_parts must be at least 0"):
        BlockCost(1, optimizer_state_nbytes=1, state_parts=(bad,))


def test_a_backward_cannot_free_more_than_there_is():
    assert StageCost(1.0, 1.0, 2, 3, backward_extra_nbytes=-5).backward_extra_nbytes == -5
    with pytest.raises(InputError, match="backward_extra_nbytes must be at least -5, a whole number, not -6"):
        StageCost(1.0, 1.0, 2, 3, backward_extra_nbytes=-6)


def test_chains():
    with pytest.raises(InputError, match="at least one stage"):
        Profile((), 1)
    with pytest.raises(InputError, match="at least one stage"):
        Profile.uniform(0)
    for bad in (-3, 2.5, nan, "5", True):
        with pytest.raises(InputError, match=rf"count must be at least 0, a whole number, not {bad!r}"):
            Profile.uniform(bad)
    with pytest.raises(InputError, match="a stage is a StageCost, not 'convolution'"):
        Profile(("convolution",), 1)
    with pytest.raises(InputError, match="uses block 2, but there are 1 blocks"):
        Profile(UniformStages(StageCost(**STAGE, block=2), 3), 1, blocks=(BlockCost(1),))


@pytest.mark.parametrize("bad", [0, -5, nan, inf, True, 1.5, "much"], ids=repr)
def test_budgets(bad):
    for name in NAMES:
        with pytest.raises(InputError, match=re.escape(str(bad))):
            planners[name](Profile.uniform(6), bad)


@pytest.mark.parametrize("name", NAMES)
def test_whole_number_knobs(name):
    knobs = planners[name].__wrapped__.__kwdefaults__ or {}
    for knob in {"slots", "segments", "interval", "segment", "base_case", "tail", "memory_steps", "period"} & set(
        knobs
    ):
        for bad in (0, -1, 2.5, True, "2", nan):
            wrong = [bad] if name == "h_revolve" else bad
            with pytest.raises(InputError, match=rf"{knob}.* must be a whole number of at least 1, not {bad!r}"):
                planners[name](Profile.uniform(6), None, None, **{knob: wrong})


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "tier" in (planners[name].__wrapped__.__kwdefaults__ or {})]
)
def test_unknown_tiers(name):
    for bad in ("tape", 7, Tier.DEVICE):
        with pytest.raises(InputError, match=r"'host' or 'disk'"):
            planners[name](Profile.uniform(6), Budget(40), None, tier=bad)


@pytest.mark.parametrize("links", [3, [1], {"host": Link(1.0)}, {(Tier.HOST, Tier.DEVICE): 3.0}])
def test_links_are_from_tier_to_tier(links):
    with pytest.raises(InputError, match="Machine: "):
        Machine(links)


@pytest.mark.parametrize("name", planners)
def test_what_is_no_profile_or_machine_is_refused(name):
    with pytest.raises(InputError, match="takes a Profile, not"):
        planners[name]([1, 2, 3], 10)
    with pytest.raises(InputError, match="takes a Machine or None, not 'fast'"):
        planners[name](Profile.uniform(4), 10, "fast")
