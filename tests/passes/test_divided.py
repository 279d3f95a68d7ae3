"""Blocks whose bytes are divided among ranks: what the judge accepts and refuses, what moves, what it takes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_chains import DEVICE, HOST, UPDATES, chains, computations, machines

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import InputError, ScheduleError
from tapestream.ir import Free, Kind, Offload, Prefetch, Schedule, Tier, Value, Wait
from tapestream.passes import choose_resident, stream_parameters
from tapestream.passes.keep import kept_between
from tapestream.passes.stays import Occupancy
from tapestream.passes.streaming import Streaming
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.simulate import simulate

SHARD = Tier.SHARD
LINKS = {(HOST, DEVICE): Link(8.0), (DEVICE, HOST): Link(8.0)}
MANY = Machine(LINKS, peers=Link(40.0))


@st.composite
def divided(draw: st.DrawFn) -> tuple[Profile, Machine, Tier]:
    machine, home = draw(machines())
    peers = Link(draw(st.sampled_from((2.0, 50.0))), draw(st.sampled_from((0.0, 0.1))))
    profile = replace(draw(chains()), shards=draw(st.sampled_from((2, 3, 8))))
    return profile, replace(machine, peers=peers), draw(st.sampled_from((home, DEVICE)))


@given(st.data())
def test_the_judge_accepts_every_schedule_just_in_time_and_early(data: st.DataObject) -> None:
    profile, machine, home = data.draw(divided())
    update, accumulate = data.draw(st.sampled_from(UPDATES)), data.draw(st.booleans())
    streaming = Streaming.of(
        data.draw(computations(profile)), profile, machine, home=home, update=update, accumulate=accumulate
    )
    every = frozenset(streaming.sizes)
    resident = every if home is DEVICE else choose_resident(profile, data.draw(st.integers(0, 200)), update=update)
    stays = streaming.stays(resident)
    least = int(Occupancy(streaming.base, stays).nbytes.max())
    allowed = max(1, least + data.draw(st.integers(0, 80)))
    before = simulate(streaming.issued(stays, None), profile, machine)
    assert before.peak_nbytes[DEVICE] <= least
    kept = kept_between(streaming.computation, stays, streaming.base, allowed)
    for budget in (None, Budget(allowed)):
        schedule, seconds = streaming.timed(kept, budget)
        after = simulate(schedule, profile, machine)
        assert seconds == pytest.approx(after.makespan_seconds, rel=1e-12)
        assert after.peak_nbytes[DEVICE] <= allowed
        assert after.forwards == before.forwards == streaming.forwards
        assert all(nbytes <= before.bytes_moved[lane] for lane, nbytes in after.bytes_moved.items())
    moved = sum(nbytes for stay in kept for _, nbytes in stay.copies())
    assert moved == sum(after.bytes_moved.values())


@given(st.data())
def test_auto_finds_plans_within_its_budget(data: st.DataObject) -> None:
    profile, machine, home = data.draw(divided())
    update = data.draw(st.sampled_from(("step", "backward")))
    streaming = Streaming.of(
        planners["store_all"](profile.without_blocks()), profile, machine, home=home, update=update
    )
    stays = streaming.stays(frozenset(streaming.sizes) if home is DEVICE else frozenset())
    budget = Budget(max(1, int(Occupancy(streaming.base, stays).nbytes.max()) + data.draw(st.integers(0, 60))))
    plan = make_plan(profile, budget, machine, update=update, home=home)
    assert plan.peak_nbytes <= (budget.device_nbytes or 0)


def chain(shards: int, n: int = 4) -> Profile:
    stages = tuple(StageCost(1.0, 2.0, 2, 3, block=k) for k in range(n))
    return Profile(stages, 2, (BlockCost(16, 16, 32 // shards),) * n, shards=shards)


def streamed(profile: Profile, machine: Machine = MANY, **knobs: object) -> Schedule:
    tape = planners["store_all"](profile.without_blocks())
    return stream_parameters(tape, profile, None, machine, **({"home": HOST, "update": "step"} | knobs))


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_rank_moves_its_share_over_its_own_link_and_the_rest_over_that_to_others(shards: int, update: str) -> None:
    profile = chain(shards)
    moved = simulate(streamed(profile, update=update), profile, MANY).bytes_moved
    step = update == "step"
    # Weights for each forward and backward (once for both of the last block), and for each update of a step; gradients
    # for that too; state, 32 bytes of all ranks together.
    gathers, updates = 7, 4 * step
    assert moved[HOST, DEVICE] == ((gathers + updates) * 16 + 4 * step * 16 + 4 * 32) // shards
    assert moved[DEVICE, HOST] == 4 * (16 + step * 16 + 32) // shards
    assert moved[SHARD, DEVICE] == gathers * (16 - 16 // shards)
    assert moved[DEVICE, SHARD] == 4 * (16 - 16 // shards)  # gradients, summed


def test_home_takes_a_share_of_the_bytes() -> None:
    one = simulate(streamed(chain(1)), chain(1), MANY).peak_nbytes[HOST]
    for shards in (2, 4):
        assert simulate(streamed(chain(shards)), chain(shards), MANY).peak_nbytes[HOST] == one // shards


def test_shards_that_stay_on_the_device_cross_no_other_link() -> None:
    profile = chain(4)
    schedule = streamed(profile, home=DEVICE)
    found = simulate(schedule, profile, Machine(peers=Link(40.0)))
    assert set(found.bytes_moved) == {(SHARD, DEVICE), (DEVICE, SHARD)}
    assert {tier for _, tier in schedule.resident} == {SHARD}


def test_gradients_of_earlier_micro_batches_are_added_to_in_the_shard() -> None:
    profile = chain(2)
    schedule = streamed(profile, update=None, accumulate=True)
    found = simulate(schedule, profile, MANY)
    assert found.bytes_moved[HOST, DEVICE] == (7 * 16 + 4 * 16) // 2
    assert found.bytes_moved[DEVICE, SHARD] == 4 * 16 // 2


def test_gathers_and_sums_go_on_under_computation() -> None:
    """Of blocks so large that what is summed at a time is small beside them."""
    unit = 2**24
    stages = tuple(StageCost(1.0, 2.0, 0, 0, block=k) for k in range(12))
    profile = Profile(stages, 0, (BlockCost(16 * unit, 16 * unit, 8 * unit),) * 12, shards=4)
    links = {lane: Link(8.0 * unit) for lane in LINKS}
    machine = Machine(links, peers=Link(16.0 * unit))
    tape = planners["store_all"](profile.without_blocks())
    streaming = Streaming.of(tape, profile, machine, home=HOST, update="backward")
    stays = streaming.stays(frozenset())
    least = int(Occupancy(streaming.base, stays).nbytes.max())
    computing, one_by_one = float(streaming.seconds[-1]), streaming.timed(stays, None)[1]
    assert one_by_one > 2.5 * computing
    # Room for the next block, the last one's gradient, and shards of a few on their way.
    early, seconds = streaming.timed(stays, Budget(least + 100 * unit))
    assert seconds < 1.25 * computing
    assert simulate(early, profile, machine).peak_nbytes[DEVICE] <= least + 100 * unit


def test_other_ranks_have_one_lane_for_both_directions() -> None:
    """A gather that starts under a sum waits for its end."""
    profile, machine = chain(2, 2), Machine(peers=Link(1.0))
    ours, theirs = Value(Kind.GRADIENT, 1), Value(Kind.PARAMETERS, 0)
    actions = []
    for action in streamed(profile, machine, home=DEVICE, update=None):
        if action == Wait(ours, SHARD):
            actions += [Prefetch(theirs, SHARD, DEVICE), action]
        elif action != Prefetch(theirs, SHARD, DEVICE) or action not in actions:
            actions.append(action)
    first = actions.index(Prefetch(theirs, SHARD, DEVICE))  # that of the forward
    assert actions.count(Prefetch(theirs, SHARD, DEVICE)) == 2
    assert first < actions.index(Wait(ours, SHARD))
    resident = streamed(profile, machine, home=DEVICE, update=None).resident
    found = simulate(Schedule.of(actions, 2, resident=resident), profile, machine)
    assert found.stall_seconds == pytest.approx(3 * 8.0 + 2 * 8.0)  # as many as one after the other


def test_machines_without_a_link_to_others_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="no link to other ranks"):
        streamed(chain(2), Machine(LINKS))


def broken(schedule: Schedule, change: object) -> str:
    """What the judge says of a schedule whose actions ``change`` has made others."""
    profile = chain(2)
    actions = [one for action in schedule for one in change(action)]  # type: ignore[operator]
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule.of(actions, schedule.stages, resident=schedule.resident), profile, MANY)
    return str(caught.value)


def without(*dropped: object) -> object:
    return lambda action: () if action in dropped else (action,)


def test_a_gather_that_is_missing_is_refused() -> None:
    value = Value(Kind.PARAMETERS, 1)
    gone = without(Prefetch(value, SHARD, DEVICE), Wait(value, DEVICE), Free(value, DEVICE))
    assert "must be current on DEVICE" in broken(streamed(chain(2)), gone)


def test_a_sum_that_is_missing_is_refused() -> None:
    value = Value(Kind.GRADIENT, 1)
    gone = without(
        Offload(value, DEVICE, SHARD), Wait(value, SHARD), Free(value, DEVICE), Offload(value, SHARD, HOST),
        Wait(value, HOST), Free(value, SHARD),
    )  # fmt: skip
    assert "was not summed over ranks" in broken(streamed(chain(2), update=None), gone)


def test_a_sum_twice_is_refused() -> None:
    value = Value(Kind.GRADIENT, 1)
    again = Offload(value, DEVICE, SHARD)
    said = broken(
        streamed(chain(2), update=None),
        lambda a: (a, again, Wait(value, SHARD)) if a == Wait(value, SHARD) else (a,),
    )
    assert "cannot be copied from DEVICE" in said


def test_an_update_by_this_rank_s_own_gradient_is_refused() -> None:
    """Whole gradients on the device are one rank's alone."""
    profile = chain(2, 1)
    schedule = streamed(profile, update="backward")
    state = Value(Kind.OPTIMIZER_STATE, 0)
    actions = [
        replace(a, target=DEVICE) if isinstance(a, Prefetch) and a.value == state
        else replace(a, tier=DEVICE) if isinstance(a, Wait | Free) and a.value == state
        else a
        for a in schedule
    ]  # fmt: skip
    with pytest.raises(ScheduleError, match="by way of SHARD"):
        simulate(Schedule.of(actions, schedule.stages, resident=schedule.resident), profile, MANY)


def test_blocks_of_one_rank_have_no_shards() -> None:
    profile, value = chain(1), Value(Kind.PARAMETERS, 0)
    schedule = streamed(profile)
    actions = [replace(a, target=SHARD) if a == Prefetch(value, HOST, DEVICE) else a for a in schedule]
    with pytest.raises(ScheduleError, match="has no shards"):
        simulate(Schedule.of(actions, schedule.stages, resident=schedule.resident), profile, MANY)


def test_every_copy_is_waited_for_once() -> None:
    schedule = streamed(chain(4), update="backward")
    begun = Counter((a.value, a.target) for a in schedule if isinstance(a, Offload | Prefetch))
    assert begun == Counter((a.value, a.tier) for a in schedule if isinstance(a, Wait))
