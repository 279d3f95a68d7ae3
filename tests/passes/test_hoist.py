"""Hoisting: never slower, never more bytes, never over the budget, and it does hide copies."""

import gc

from hypothesis import given
from hypothesis import strategies as st
from streamed_chains import DEVICE, HOST, UPDATES, chains, computations, machines

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.ir import Kind, Phase, PhaseKind, Prefetch, Tier, Value
from tapestream.passes import choose_resident, hoist, stream_parameters
from tapestream.passes.hoist import hide_copies
from tapestream.planners import planners
from tapestream.simulate import simulate


@given(st.data())
def test_hoisting_is_accepted_and_never_worse(data: st.DataObject) -> None:
    profile = data.draw(chains())
    machine, home = data.draw(machines())
    update, accumulate = data.draw(st.sampled_from(UPDATES)), data.draw(st.booleans())
    resident = choose_resident(profile, data.draw(st.integers(0, 100)), update=update)
    schedule = stream_parameters(
        data.draw(computations(profile)), profile, None, machine,
        home=home, update=update, resident=resident, accumulate=accumulate,
    )  # fmt: skip
    before = simulate(schedule, profile, machine)
    more = st.integers(0, 60)
    budget = Budget(
        max(1, before.peak_nbytes[DEVICE] + data.draw(more)), host=before.peak_nbytes[HOST] + data.draw(more)
    )
    for found in (hide_copies(schedule, profile, budget, machine), hoist(schedule, profile, budget, machine)):
        after = simulate(found, profile, machine, budget)
        assert all(nbytes <= before.bytes_moved[lane] for lane, nbytes in after.bytes_moved.items())
        assert after.forwards == before.forwards
        assert found.resident == schedule.resident
    assert after.makespan_seconds <= before.makespan_seconds
    assert hoist(schedule, profile, budget, machine) == found
    again = hoist(found, profile, budget, machine)
    assert simulate(again, profile, machine, budget).makespan_seconds <= after.makespan_seconds


def chain(n: int = 12) -> tuple[Profile, Machine]:
    profile = Profile(tuple(StageCost(1.0, 2.0, 2, 3, block=k) for k in range(n)), 2, (BlockCost(10, 10, 20),) * n)
    return profile, Machine({(HOST, DEVICE): Link(10.0), (DEVICE, HOST): Link(10.0)})


def streamed(profile: Profile, machine: Machine, update: str | None):
    schedule = planners["store_all"](profile.without_blocks())
    return stream_parameters(schedule, profile, None, machine, home=HOST, update=update)


def test_two_blocks_of_room_hide_all_but_the_ends() -> None:
    profile, machine = chain()
    schedule = streamed(profile, machine, None)
    peak = simulate(schedule, profile, machine).peak_nbytes[DEVICE]
    after = simulate(hoist(schedule, profile, Budget(peak + 20), machine), profile, machine)
    # One second to fetch the first block and one to send the last gradient home; every other copy hides.
    assert after.stall_seconds <= 2.0 + 1e-9


def test_unlimited_memory_reads_each_block_once() -> None:
    profile, machine = chain()
    after = simulate(hoist(streamed(profile, machine, None), profile, None, machine), profile, machine)
    assert after.bytes_moved[HOST, DEVICE] == 12 * 10


def test_no_copy_crosses_into_the_step_phase() -> None:
    profile, machine = chain(4)
    found = list(hoist(streamed(profile, machine, "step"), profile, None, machine))
    step = found.index(Phase(PhaseKind.STEP))
    states = [i for i, a in enumerate(found) if isinstance(a, Prefetch) and a.value.kind is Kind.OPTIMIZER_STATE]
    assert min(states) > step
    assert found[step - 1] == found[step - 1].__class__(Value(Kind.GRADIENT, 0), Tier.DEVICE)


def test_schedules_without_parameter_copies_are_returned_as_they_are() -> None:
    profile, machine = chain()
    schedule = planners["periodic"](profile.without_blocks())
    assert hoist(schedule, profile.without_blocks(), None, machine) is schedule


def test_nothing_of_a_walk_stays() -> None:
    """Planning makes thousands, often with the collector off: what they hold must go with them."""
    profile, machine = chain()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one).__name__ == "_Walk" for one in gc.get_objects())
        streamed(profile, machine, "backward")
        after = sum(type(one).__name__ == "_Walk" for one in gc.get_objects())
    finally:
        gc.enable()
    assert after == before
