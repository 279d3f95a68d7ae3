"""Parameter streaming: what the judge accepts, and what moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_chains import DEVICE, DISK, HOST, UPDATES, chains, computations, machines

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Free, Kind, Offload, Phase, PhaseKind, Prefetch, Series, Update, Value, Wait
from tapestream.passes import choose_resident, stream_parameters
from tapestream.planners import planners
from tapestream.simulate import simulate

NEAR = Machine({(HOST, DEVICE): Link(8.0), (DEVICE, HOST): Link(8.0)})


def three_stages(**block: int) -> Profile:
    cost = {"parameters_nbytes": 10, "gradient_nbytes": 10, "optimizer_state_nbytes": 20} | block
    return Profile(tuple(StageCost(1.0, 2.0, 4, 6, block=k) for k in range(3)), 4, (BlockCost(**cost),) * 3)


def streamed(profile: Profile, **knobs: object):
    schedule = planners["store_all"](profile.without_blocks())
    return stream_parameters(schedule, profile, None, NEAR, **({"home": HOST, "update": "step"} | knobs))


@given(st.data())
def test_the_judge_accepts_every_streamed_schedule(data: st.DataObject) -> None:
    profile = data.draw(chains())
    machine, home = data.draw(machines())
    update, accumulate = data.draw(st.sampled_from(UPDATES)), data.draw(st.booleans())
    resident = choose_resident(profile, data.draw(st.integers(0, 300)), update=update)
    schedule = data.draw(computations(profile))
    found = stream_parameters(
        schedule, profile, None, machine, home=home, update=update, resident=resident, accumulate=accumulate
    )
    simulation = simulate(found, profile, machine)
    before = simulate(schedule, profile.without_blocks(), machine)
    updates = sum(isinstance(action, Update) for action in found)
    assert simulation.forwards == before.forwards
    if update is None or accumulate or not before.backwards:
        assert updates == 0
    else:
        used = {s.block for s in profile.stages if s.block is not None}
        assert updates == sum(len(profile.blocks[b].parts) for b in used if profile.blocks[b].gradient_nbytes)
    # What it says it needs is what it reaches.
    exact = simulation.peak_nbytes[DEVICE]
    stream_parameters(
        schedule,
        profile,
        Budget(exact or 1),
        machine,
        home=home,
        update=update,
        resident=resident,
        accumulate=accumulate,
    )


@given(st.data())
def test_a_home_on_the_device_moves_nothing(data: st.DataObject) -> None:
    profile, update = data.draw(chains()), data.draw(st.sampled_from(UPDATES))
    schedule = data.draw(computations(profile))
    found = stream_parameters(schedule, profile, None, None, home=DEVICE, update=update)
    assert simulate(found, profile).bytes_moved == {}


def test_bytes_moved_are_those_of_each_update_mode() -> None:
    profile = three_stages()
    inward, outward = (HOST, DEVICE), (DEVICE, HOST)
    # The turn and the last record share one stay, so stage 2 is read once: 50 bytes of parameters in all.
    moved = simulate(streamed(profile), profile, NEAR).bytes_moved
    assert moved == {inward: 50 + 3 * (10 + 10 + 20), outward: 3 * 10 + 3 * (10 + 20)}
    moved = simulate(streamed(profile, update="backward"), profile, NEAR).bytes_moved
    assert moved == {inward: 50 + 3 * 20, outward: 3 * (10 + 20)}
    moved = simulate(streamed(profile, update=None), profile, NEAR).bytes_moved
    assert moved == {inward: 50, outward: 3 * 10}
    moved = simulate(streamed(profile, accumulate=True), profile, NEAR).bytes_moved
    assert moved == {inward: 50 + 3 * 10, outward: 3 * 10}


def test_frozen_blocks_are_read_and_never_written() -> None:
    profile = three_stages(gradient_nbytes=0)
    found = streamed(profile)
    assert simulate(found, profile, NEAR).bytes_moved == {(HOST, DEVICE): 50}
    assert not any(isinstance(action, Offload | Update) or action == Phase(PhaseKind.STEP) for action in found)


def test_two_hops_pass_through_the_host_and_leave_nothing_there() -> None:
    machine = Machine({**NEAR.links, (DISK, HOST): Link(2.0), (HOST, DISK): Link(2.0)})
    profile = Profile((StageCost(1.0, 1.0, 1, 1, block=0),), 1, (BlockCost(10),))
    schedule = planners["store_all"](profile.without_blocks())
    value = Value(Kind.PARAMETERS, 0)
    found = list(stream_parameters(schedule, profile, None, machine, home=DISK, update=None))
    assert found[1:6] == [
        Prefetch(value, DISK, HOST), Wait(value, HOST),
        Prefetch(value, HOST, DEVICE), Wait(value, DEVICE), Free(value, HOST),
    ]  # fmt: skip


def test_a_long_loop_with_everything_resident_keeps_its_tree() -> None:
    profile = Profile(UniformStages(StageCost(1.0, 1.0, 4, 4, block=0), 10**7), 4, (BlockCost(8, 8, 16),))
    schedule = planners["store_all"](profile.without_blocks())
    found = stream_parameters(schedule, profile, None, None, home=DEVICE, update="step")
    assert isinstance(found.root, Series)
    assert len(found.root.children) == 4
    assert found.size == schedule.size + 3


def test_what_cannot_fit_is_said_with_the_bytes_that_do() -> None:
    profile = three_stages()
    schedule = planners["store_all"](profile.without_blocks())
    with pytest.raises(BudgetError, match="allow") as caught:
        stream_parameters(schedule, profile, Budget(20), NEAR, home=HOST, update="step")
    least = caught.value.least_nbytes
    found = stream_parameters(schedule, profile, Budget(least), NEAR, home=HOST, update="step")
    assert simulate(found, profile, NEAR, Budget(least)).peak_nbytes[DEVICE] == least


def test_a_machine_without_the_link_is_refused() -> None:
    with pytest.raises(InputError, match="link"):
        streamed(three_stages(), home=DISK)
