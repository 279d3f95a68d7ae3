"""Values kept between uses: what the judge accepts, what no longer moves, and what is never kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streamed_chains import DEVICE, HOST, chains, computations, machines

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.ir import Forward, Kind, Offload, Phase, PhaseKind, Prefetch, Schedule, Tier, Value
from tapestream.passes.keep import kept_between
from tapestream.passes.stays import Occupancy, read_stays
from tapestream.passes.streaming import Streaming
from tapestream.planners import planners
from tapestream.simulate import simulate

NEAR = Machine({(HOST, DEVICE): Link(8.0), (DEVICE, HOST): Link(8.0)})


@given(st.data())
def test_whatever_is_kept_the_judge_accepts_within_the_budget(data: st.DataObject) -> None:
    profile, update = data.draw(chains()), data.draw(st.sampled_from(("step", "backward")))
    machine, home = data.draw(machines())
    streaming = Streaming.of(data.draw(computations(profile)), profile, machine, home=home, update=update)
    stays = streaming.stays(frozenset())
    least = int(Occupancy(streaming.base, stays).nbytes.max())
    allowed = max(1, least + data.draw(st.integers(0, 80)))
    before = simulate(streaming.issued(stays, None), profile, machine)
    kept = kept_between(streaming.computation, stays, streaming.base, allowed, across=True)
    for budget in (None, Budget(allowed)):
        schedule, seconds = streaming.timed(kept, budget, across=True)
        after = simulate(schedule, profile, machine)
        assert seconds == pytest.approx(after.makespan_seconds, rel=1e-12)
        assert streaming.forwards == after.forwards
        assert after.peak_nbytes[DEVICE] <= allowed
        assert sum(after.bytes_moved.values()) <= sum(before.bytes_moved.values())
        assert after.forwards == before.forwards
        assert read_stays(schedule, profile)[0] == streaming.computation
    for value, tier in schedule.resident:
        trained = profile.blocks[value.index].gradient_nbytes > 0
        throughout = not any(isinstance(a, Offload | Prefetch) and a.value == value for a in schedule)
        # Users may change what they see between steps: only what is written afterwards anyway may come and go.
        assert tier is not DEVICE or throughout or (trained and value.kind is Kind.PARAMETERS)


def chain(update: str, room: int) -> tuple[Schedule, Profile]:
    """Four blocks of 10 bytes (20 of state) and no tape to speak of; ``room`` bytes beyond the least."""
    profile = Profile(tuple(StageCost(1.0, 2.0, 0, 0, block=k) for k in range(4)), 0, (BlockCost(10, 10, 20),) * 4)
    streaming = Streaming.of(planners["store_all"](profile.without_blocks()), profile, NEAR, home=HOST, update=update)
    stays = streaming.stays(frozenset())
    allowed = int(Occupancy(streaming.base, stays).nbytes.max()) + room
    kept = kept_between(streaming.computation, stays, streaming.base, allowed, across=True)
    return streaming.issued(kept, Budget(allowed), across=True), profile


def parameters(schedule: Schedule, kind: type[Prefetch] | type[Offload]) -> list[int]:
    found = (a.value for a in schedule if isinstance(a, kind))
    return sorted(value.index for value in found if value.kind is Kind.PARAMETERS)


def on_device(schedule: Schedule) -> set[Value]:
    return {value for value, tier in schedule.resident if tier is Tier.DEVICE}


def test_the_block_updated_last_stays_for_the_next_forward_and_is_written_then() -> None:
    schedule, profile = chain("backward", 0)
    assert on_device(schedule) == {Value(Kind.PARAMETERS, 0)}
    assert parameters(schedule, Prefetch) == [0, 1, 1, 2, 2, 3]  # block 3 serves the turn, block 0 the next step
    assert parameters(schedule, Offload) == [0, 1, 2, 3]
    actions = list(schedule)
    written = next(i for i, a in enumerate(actions) if isinstance(a, Offload))
    assert actions[written - 1] == Forward(0, 1) or actions.index(Phase(PhaseKind.BACKWARD)) > written
    assert simulate(schedule, profile, NEAR).bytes_moved[HOST, DEVICE] == 6 * 10 + 4 * 20


def test_room_for_one_block_keeps_it_throughout() -> None:
    schedule, _ = chain("backward", 10)
    assert len(parameters(schedule, Offload)) == 3
    assert parameters(schedule, Prefetch) == [1, 2, 2, 3]  # while block 0 is updated block 1 has its room


def test_gradients_and_parameters_stay_for_the_step_phase() -> None:
    schedule, profile = chain("step", 60)
    assert not any(isinstance(a, Offload) and a.value.kind is Kind.GRADIENT for a in schedule)
    moved = simulate(schedule, profile, NEAR).bytes_moved
    assert sum(moved.values()) <= 4 * 40 + 4 * 30  # state once each way, parameters at most twice in, once out


def test_parameters_that_nothing_updates_are_not_left_between_steps_unless_they_never_move() -> None:
    profile = Profile(tuple(StageCost(1.0, 2.0, 0, 0, block=k) for k in range(4)), 0, (BlockCost(10),) * 4)
    streaming = Streaming.of(
        planners["store_all"](profile.without_blocks()), profile, NEAR, home=HOST, update="backward"
    )
    stays = streaming.stays(frozenset())
    for room in (0, 10, 20, 30):
        kept = kept_between(streaming.computation, stays, streaming.base, 10 + room, across=True)
        found = streaming.issued(kept, None)
        moving = {a.value for a in found if isinstance(a, Prefetch)}
        assert not moving & on_device(found)
        assert not any(isinstance(a, Offload) for a in found)
    assert not moving
