"""Which values are kept on the device."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from streamed_chains import UPDATES, chains

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError
from tapestream.ir import Kind, Offload, Tier, Value
from tapestream.passes import choose_resident
from tapestream.passes.memory import block_values
from tapestream.passes.residence import at_start, at_step_of, idle_nbytes, resident_of
from tapestream.planning.auto import make_plan


@given(chains(), st.sampled_from(UPDATES), st.integers(0, 200), st.integers(0, 200))
def test_more_room_keeps_a_superset_that_fits(profile: Profile, update, less: int, more: int) -> None:
    sizes = dict(block_values(profile))
    small = choose_resident(profile, min(less, more), update=update)
    large = choose_resident(profile, max(less, more), update=update)
    assert small <= large
    assert sum(sizes[value] for value in large) <= max(less, more)


@given(chains(), st.sampled_from(UPDATES), st.integers(1, 400))
def test_what_lies_there_between_chains(profile: Profile, update, more: int) -> None:
    """Where backward updates blocks too, the end is as the start."""
    link = Link(10.0)
    machine = Machine({(Tier.HOST, Tier.DEVICE): link, (Tier.DEVICE, Tier.HOST): link})
    try:
        schedule = make_plan(profile, more, machine, update=update).schedule
    except BudgetError:
        return
    sizes = dict(block_values(profile))
    after = resident_of(schedule, profile, update, at_step_of(schedule))
    most = max(sum(sizes.get(value, 0) for value in found) for found in (at_start(schedule), after))
    assert idle_nbytes(schedule, profile, update) == most


def test_blocks_without_bytes_are_no_values() -> None:
    """As a module beside a deep chain has them: one block of its own, and the places of the chain's."""
    nothing, own = BlockCost(0), BlockCost(8, 8, state_parts=(3, 0, 4), optimizer_state_nbytes=7)
    profile = Profile((StageCost(1.0, 1.0, 1, 1, block=2),), 1, (nothing, nothing, own, nothing, BlockCost(0, 0, 5)))
    assert profile.holding == (2, 4)
    state = [(Value(Kind.OPTIMIZER_STATE, 2, 0), 3), (Value(Kind.OPTIMIZER_STATE, 2, 2), 4)]
    found = [(Value(Kind.PARAMETERS, 2), 8), (Value(Kind.GRADIENT, 2), 8), *state]
    assert list(block_values(profile)) == [*found, (Value(Kind.OPTIMIZER_STATE, 4), 5)]
    assert replace(profile, blocks=(nothing, nothing, own)).holding == (2,)
    assert replace(profile, outside_nbytes=1) != profile == replace(profile)
    assert profile.without_blocks().holding == ()


def test_the_most_used_bytes_come_first_and_are_spread_over_the_chain() -> None:
    stages = tuple(StageCost(1.0, 1.0, 1, 1, block=k % 4) for k in range(5))
    profile = Profile(stages, 1, tuple(BlockCost(10, 10, 20) for _ in range(4)))
    assert choose_resident(profile, 10, update="step") == {Value(Kind.PARAMETERS, 0)}  # used by two stages
    assert choose_resident(profile, 20, update="step") == {Value(Kind.PARAMETERS, k) for k in (0, 2)}
    assert choose_resident(profile, 40, update="backward") == {Value(Kind.PARAMETERS, k) for k in range(4)}
    everything = choose_resident(profile, 10**6, update="backward")
    assert Value(Kind.GRADIENT, 0) not in everything  # it never leaves the device before its update
    assert Value(Kind.OPTIMIZER_STATE, 3) in everything


def test_on_a_gpu_a_gradient_is_resident_exactly_if_its_parameters_are() -> None:
    """Users see a parameter and its gradient on one device, so plans for machines with a host tier never part them."""
    stage = StageCost(1.0, 2.0, 8, 8, block=0)
    stages = tuple(replace(stage, block=k) for k in range(6))
    profile = Profile(stages, 8, tuple(BlockCost(100, 100, 200) for _ in range(6)))
    link = Link(100.0)
    lanes = ((Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST))
    machine = Machine(dict.fromkeys(lanes, link))
    resident_some = False
    for nbytes in range(700, 2600, 90):
        plan = make_plan(profile, Budget(nbytes), machine, update="step", home=Tier.HOST)
        on_device = {value for value, tier in plan.schedule.resident if tier is Tier.DEVICE}
        parameters = {v.index for v in on_device if v.kind is Kind.PARAMETERS}
        sent = {a.value.index for a in plan.schedule if isinstance(a, Offload) and a.value.kind is Kind.GRADIENT}
        assert parameters == set(range(6)) - sent
        resident_some = resident_some or 0 < len(parameters) < 6
    assert resident_some
