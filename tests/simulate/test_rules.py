"""Every rule of docs/ir.md: a schedule that breaks it is refused, at the right action and for the right reason."""

from dataclasses import replace

import pytest

from tapestream.costs import BlockCost, Carried, Link, Machine, Profile, StageCost
from tapestream.errors import InputError, ScheduleError
from tapestream.ir import (
    MEMORIES,
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.simulate import simulate

DEVICE, HOST, DISK = MEMORIES
FORWARD, BACKWARD, STEP = (Phase(kind) for kind in PhaseKind)
STATE, SAVED, COTANGENT = Kind.STATE, Kind.SAVED, Kind.COTANGENT
PARAMETERS, GRADIENT, OPTIMIZER = Kind.PARAMETERS, Kind.GRADIENT, Kind.OPTIMIZER_STATE

PLAIN = Profile(tuple(StageCost(1, 1, 10, 100) for _ in range(2)), 10)
BLOCKS = Profile(
    tuple(StageCost(1, 1, 10, 100, block=0) for _ in range(2)),
    10,
    (BlockCost(1000, 1000, 2000, buffers_nbytes=50, update_extra_nbytes=7),),
)
AT_HOST = tuple((Value(kind, 0), HOST) for kind in (PARAMETERS, Kind.BUFFERS, OPTIMIZER))
AT_DEVICE = tuple((Value(kind, 0), DEVICE) for kind in (PARAMETERS, Kind.BUFFERS, OPTIMIZER))
STORE_ALL = [FORWARD, Record(0), Record(1), BACKWARD, Backward(1), Backward(0)]


def brings(kind: Kind, source: Tier = HOST) -> list[Action]:
    return [Prefetch(Value(kind, 0), source, DEVICE), Wait(Value(kind, 0), DEVICE)]


def saves(kind: Kind, index: int = 0) -> list[Action]:
    return [Offload(Value(kind, index), DEVICE, HOST), Wait(Value(kind, index), HOST)]


def refused(actions: list[Action], position: int, text: str, profile: Profile = PLAIN, resident: object = ()) -> None:
    schedule = Schedule.of(actions, len(profile), resident=resident)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, profile)
    assert text in str(caught.value)
    assert caught.value.position == position
    assert f"> {position}: " in str(caught.value)


PLAIN_CASES: dict[str, tuple[list[Action], int, str]] = {
    "empty": ([], 0, "must start with Phase(FORWARD)"),
    "phase first": ([Forward(0, 1)], 0, "first action must be Phase(FORWARD)"),
    "wrong first phase": ([BACKWARD], 0, "FORWARD is next"),
    "phase twice": ([FORWARD, FORWARD], 1, "BACKWARD is next"),
    "nothing after the step": ([*STORE_ALL, STEP, STEP], 7, "none is next"),
    "turn not at the end": ([FORWARD, Forward(0, 1), BACKWARD], 2, "live state must be 2, the last, and is 1"),
    "step too early": ([*STORE_ALL[:5], STEP], 5, "Backward(0) and those below it must come before the step"),
    "empty forward": ([FORWARD, Forward(0, 0)], 1, "0 <= start < stop <= 2"),
    "forward too far": ([FORWARD, Forward(0, 3)], 1, "0 <= start < stop <= 2"),
    "forward from elsewhere": ([FORWARD, Forward(1, 2)], 1, "live state must be 1 and is 0"),
    "record from elsewhere": ([FORWARD, Record(1)], 1, "live state must be 1 and is 0"),
    "no such stage": ([FORWARD, Record(2)], 1, "there is no stage 2"),
    "negative stage": ([FORWARD, Record(-1)], 1, "there is no stage -1"),
    "recorded twice": ([FORWARD, Keep(0), Record(0), Restore(0), Record(0)], 4, "stage 0 is recorded already"),
    "backward in forward": ([FORWARD, Record(0), Record(1), Backward(1)], 3, "COTANGENT 2 is nowhere"),
    "backward order": ([*STORE_ALL[:4], Backward(0)], 4, "Backward(1) is next"),
    "backward twice": ([*STORE_ALL[:5], Backward(1)], 5, "Backward(0) is next"),
    "not recorded": ([FORWARD, Forward(0, 2), BACKWARD, Backward(1)], 3, "SAVED 1 is nowhere"),
    "saved freed": (
        [*STORE_ALL[:4], Free(Value(SAVED, 1), DEVICE), Backward(1)], 5, "SAVED 1 is nowhere",
    ),
    "saved in another tier": (
        [*STORE_ALL[:3], *saves(SAVED, 1), Free(Value(SAVED, 1), DEVICE), BACKWARD, Backward(1)],
        7, "SAVED 1 is current in HOST",
    ),
    "saved still being copied": (
        [*STORE_ALL[:4], Offload(Value(SAVED, 1), DEVICE, HOST), Backward(1)], 5, "drops SAVED 1 while it is in flight",
    ),
    "keep another": ([FORWARD, Keep(1)], 1, "live state must be 1 and is 0"),
    "keep twice": ([FORWARD, Keep(0), Keep(0)], 2, "state 0 is kept already"),
    "restore unkept": ([FORWARD, Forward(0, 1), Restore(0)], 2, "state 0 is not kept on DEVICE"),
    "free unkept": ([FORWARD, Free(Value(STATE, 0), DEVICE)], 1, "STATE 0 is not kept on DEVICE"),
    "offload to faster": ([FORWARD, Offload(Value(STATE, 0), HOST, DEVICE)], 1, "use Prefetch"),
    "prefetch to slower": ([FORWARD, Prefetch(Value(STATE, 0), DEVICE, HOST)], 1, "use Offload"),
    "nothing at the source": ([FORWARD, Prefetch(Value(STATE, 0), HOST, DEVICE)], 1, "cannot be copied from HOST"),
    "nothing to copy": ([FORWARD, *saves(STATE), Offload(Value(STATE, 0), DEVICE, HOST)], 3, "nothing to copy"),
    "two copies in flight": (
        [FORWARD, Offload(Value(STATE, 0), DEVICE, HOST), Offload(Value(STATE, 0), DEVICE, DISK)],
        2, "at most one copy in flight",
    ),
    "unknown state": ([FORWARD, Offload(Value(STATE, 3), DEVICE, HOST)], 1, "there is no STATE 3"),
    "unknown part": ([FORWARD, Offload(Value(STATE, 0, 1), DEVICE, HOST)], 1, "there is no STATE 0 part 1"),
    "unknown block": ([FORWARD, Update(0)], 1, "there is no PARAMETERS 0"),
    "dropped in flight": (
        [FORWARD, Offload(Value(STATE, 0), DEVICE, HOST), Forward(0, 1)], 2, "drops STATE 0 on DEVICE while it is in",
    ),
    "wait for nothing": ([FORWARD, Wait(Value(STATE, 0), HOST)], 1, "not in flight to HOST"),
    "wait in the wrong tier": (
        [FORWARD, Offload(Value(STATE, 0), DEVICE, HOST), Wait(Value(STATE, 0), DISK)], 2, "not in flight to DISK",
    ),
    "free in flight": (
        [FORWARD, Keep(0), Offload(Value(STATE, 0), DEVICE, HOST), Free(Value(STATE, 0), DEVICE)], 3, "put Wait before",
    ),
    "free nothing": ([FORWARD, Free(Value(SAVED, 0), DEVICE)], 1, "nothing to free in DEVICE"),
    "restore in flight": (
        [FORWARD, *saves(STATE), Forward(0, 1), Prefetch(Value(STATE, 0), HOST, DEVICE), Restore(0)],
        5, "put Wait before Restore",
    ),
    "remade in flight": (
        [FORWARD, Keep(0), Forward(0, 1), *saves(STATE, 1), Restore(0), Prefetch(Value(STATE, 1), HOST, DEVICE),
         Forward(0, 1)],
        7, "this run makes STATE 1, which is in flight to DEVICE",
    ),
    "freed cotangent": ([*STORE_ALL, Free(Value(COTANGENT, 0), DEVICE)], 6, "last current copy"),
    "cotangent elsewhere": (
        [*STORE_ALL, *saves(COTANGENT), Free(Value(COTANGENT, 0), DEVICE)], 9, "current on DEVICE for the caller",
    ),
    "cotangent elsewhere at backward": (
        [*STORE_ALL[:5], *saves(COTANGENT, 1), Free(Value(COTANGENT, 1), DEVICE), Backward(0)], 8, "COTANGENT 1",
    ),
    "cotangent elsewhere at step": (
        [*STORE_ALL, *saves(COTANGENT), Free(Value(COTANGENT, 0), DEVICE), STEP], 9, "COTANGENT 0 is current in HOST",
    ),
    "backwards missing": (STORE_ALL[:5], 5, "stage 0 is still recorded"),
    "nothing recorded, backwards missing": ([FORWARD, Forward(0, 2), BACKWARD], 3, "Backward(1) and those below"),
    "inside of another": ([FORWARD, KeepInside(1)], 1, "live state must be 1 and is 0"),
    "inside of another run": (
        [FORWARD, Keep(0), Forward(0, 1), KeepInside(1), Restore(0), Forward(0, 1)], 5, "KeepInside(1) must be",
    ),
    "inside of a record": ([FORWARD, KeepInside(0), Record(0)], 2, "KeepInside(0) must be followed by a Forward"),
    "inside of what is recorded": (
        [FORWARD, Keep(0), Record(0), Restore(0), KeepInside(0)], 4, "stage 0 is recorded, or its inside kept",
    ),
    "inside twice": (
        [FORWARD, Keep(0), KeepInside(0), Forward(0, 1), Restore(0), KeepInside(0)], 5, "or its inside kept, already",
    ),
    "inside moved": (
        [FORWARD, KeepInside(0), Forward(0, 1), Offload(Value(Kind.INSIDE, 0), DEVICE, HOST)], 3, "stays on DEVICE",
    ),
    "inside freed twice": (
        [FORWARD, KeepInside(0), Forward(0, 1), *[Free(Value(Kind.INSIDE, 0), DEVICE)] * 2], 4, "nothing to free",
    ),
    "inside at the end": ([FORWARD, KeepInside(0), Forward(0, 2)], 3, "INSIDE 0 is still kept"),
    "still kept": ([FORWARD, Keep(0), *STORE_ALL[1:]], 7, "state 0 is still kept"),
    "left on host": ([FORWARD, *saves(STATE), *STORE_ALL[1:]], 8, "STATE 0 is current in HOST"),
    "still in flight": ([FORWARD, Forward(0, 2), Offload(Value(STATE, 2), DEVICE, HOST)], 3, "put Wait before the end"),
    "forward only stops short": ([FORWARD, Forward(0, 1)], 2, "live state must be 2 at the end"),
    "forward only records": (
        [FORWARD, Record(0), Free(Value(SAVED, 0), DEVICE), Forward(1, 2)], 4, "must not Record",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN_CASES)
def test_broken_rule_of_a_chain_without_blocks(name: str) -> None:
    refused(*PLAIN_CASES[name])


UP = [*brings(PARAMETERS), *brings(Kind.BUFFERS)]
DOWN = [Free(Value(PARAMETERS, 0), DEVICE), Free(Value(Kind.BUFFERS, 0), DEVICE)]
TO_HOST = [*saves(GRADIENT), Free(Value(GRADIENT, 0), DEVICE)]
WHOLE = [FORWARD, *UP, *STORE_ALL[1:]]  # ends with parameters and gradient on DEVICE, 10 actions long
ON_HOST: list[Action] = [Update(0, 0, HOST), Wait(Value(PARAMETERS, 0), HOST)]
BLOCK_CASES: dict[str, tuple[list[Action], int, str]] = {
    "parameters missing": ([FORWARD, Forward(0, 1)], 1, "PARAMETERS 0 is current in HOST, it must be current on DEV"),
    "parameters on their way": (
        [FORWARD, Prefetch(Value(PARAMETERS, 0), HOST, DEVICE), Record(0)], 2, "in flight from HOST to DEVICE",
    ),
    "buffers missing": ([FORWARD, *brings(PARAMETERS), Record(0)], 3, "BUFFERS 0 is current in HOST"),
    "parameters gone at backward": ([*WHOLE[:8], *DOWN, Backward(1)], 10, "PARAMETERS 0 is current in HOST"),
    "last parameters": ([FORWARD, Free(Value(PARAMETERS, 0), HOST)], 1, "its last current copy"),
    "last optimizer state": ([FORWARD, Free(Value(OPTIMIZER, 0), HOST)], 1, "its last current copy"),
    "gradient overwritten": ([*WHOLE[:9], *TO_HOST, Backward(0)], 12, "would be overwritten instead of added to"),
    "gradient forgotten": (
        [*WHOLE[:9], Free(Value(GRADIENT, 0), DEVICE), Backward(0)], 10, "was freed with the sum of earlier backwards",
    ),
    "gradient added to in flight": (
        [*WHOLE[:9], Offload(Value(GRADIENT, 0), DEVICE, HOST), Backward(0)], 10, "writes GRADIENT 0 while it is in",
    ),
    "gradient lost": ([*WHOLE, Free(Value(GRADIENT, 0), DEVICE), *DOWN], 13, "GRADIENT 0 was freed before the caller"),
    "update without gradient there": ([*WHOLE, Update(0)], 10, "must be current in DEVICE; PARAMETERS 0 is"),
    "update too early": ([*WHOLE[:9], Update(0)], 9, "Backward(0) still uses block 0"),
    "update twice": ([*WHOLE, *saves(GRADIENT), *ON_HOST, Update(0)], 14, "updated already"),
    "update on the disk": ([*WHOLE, Update(0, 0, DISK)], 10, "runs on the device or in HOST, not in DISK"),
    "update on the host without its gradient": ([*WHOLE, *ON_HOST], 10, "must be current in HOST; PARAMETERS 0 is"),
    "weights go up too early": (
        [*WHOLE, *DOWN, *TO_HOST, ON_HOST[0], *brings(PARAMETERS)],
        16, "PARAMETERS 0 is current in HOST, being updated",
    ),
    "a gradient freed too early": (
        [*WHOLE, *DOWN, *TO_HOST, ON_HOST[0], Free(Value(GRADIENT, 0), HOST)], 16, "being updated in HOST; put Wait",
    ),
    "state sent away too early": (
        [*WHOLE, *TO_HOST, ON_HOST[0], Offload(Value(OPTIMIZER, 0), HOST, DISK)], 14, "at most one copy in flight",
    ),
    "the wrong wait": ([*WHOLE, *TO_HOST, ON_HOST[0], Wait(Value(GRADIENT, 0), HOST)], 14, "wait for PARAMETERS 0"),
    "no wait": ([*WHOLE, *DOWN, *TO_HOST, ON_HOST[0]], 16, "being updated in HOST; put Wait before the end"),
    "update in flight": (
        [*WHOLE, *DOWN, *TO_HOST, Prefetch(Value(PARAMETERS, 0), HOST, DEVICE), ON_HOST[0]],
        16, "in flight from HOST to DEVICE; put Wait before its update in HOST",
    ),
    "stale copy at the end": (
        [*WHOLE, *TO_HOST, Free(Value(Kind.BUFFERS, 0), DEVICE), STEP, *ON_HOST, Free(Value(GRADIENT, 0), HOST)],
        18, "PARAMETERS 0 is current in HOST, stale in DEVICE at the end; at the start of the step it was: HOST",
    ),
    "stale copies cannot be read": (
        [*WHOLE, *TO_HOST, STEP, *ON_HOST, Offload(Value(PARAMETERS, 0), DEVICE, DISK)], 16, "stale in DEVICE",
    ),
    "left on device": ([*WHOLE, *TO_HOST], 13, "PARAMETERS 0 is current in DEVICE, current in HOST at the end"),
    "gradient left after the step": ([*WHOLE, *DOWN, *TO_HOST, STEP, *ON_HOST], 18, "it was: nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCK_CASES)
def test_broken_rule_of_parameter_blocks(name: str) -> None:
    refused(*BLOCK_CASES[name], profile=BLOCKS, resident=AT_HOST)


def test_streamed_step_is_valid_and_counted() -> None:
    actions = [*WHOLE, *DOWN, *TO_HOST, STEP, *ON_HOST, Free(Value(GRADIENT, 0), HOST)]
    found = simulate(Schedule.of(actions, 2, resident=AT_HOST), BLOCKS)
    # Last backward: blocks 1050, gradient 1000, saved 100, states 0 (tape), cotangents 1 and 0.
    # First backward: in its place two saved, states 0 and 1 (tape) and cotangents 2 and 1.
    assert found.peak_nbytes == {DEVICE: 1050 + 1000 + 200 + 20 + 20, HOST: 3050 + 1000 + 7, DISK: 0}
    assert found.bytes_moved == {(HOST, DEVICE): 1050, (DEVICE, HOST): 1000}
    assert found.stall_seconds == 0


HOSTED = replace(BLOCKS, blocks=(replace(BLOCKS.blocks[0], host_update_seconds=3.0),))
LATE_AT_HOST = (*AT_HOST, (Value(GRADIENT, 0), HOST))
UPDATED = [*ON_HOST, Free(Value(GRADIENT, 0), HOST)]


def test_an_update_on_the_host_runs_beside_the_device() -> None:
    steps = [StageCost(1, 1, 10, 100), *HOSTED.stages]
    profile = replace(HOSTED, stages=tuple(steps))
    backward = [BACKWARD, Backward(2), Backward(1), *DOWN, *TO_HOST, ON_HOST[0], Backward(0)]
    actions = [FORWARD, Record(0), *UP, Record(1), Record(2), *backward, *UPDATED[1:]]
    found = simulate(Schedule.of(actions, 3, resident=AT_HOST), profile)
    assert found.compute_seconds == 6
    assert found.makespan_seconds == 5 + 3  # one second of three passes under the last backward
    assert found.stall_seconds == 2
    assert found.peak_nbytes[HOST] == 3050 + 1000 + 7
    (span,) = [span for span in found.timeline.spans if span.lane == "updates on HOST"]
    assert (span.name, span.start_seconds, span.duration_seconds) == ("Update 0", 5.0, 3.0)


def test_a_late_update_uses_the_gradient_of_the_step_before() -> None:
    actions = [FORWARD, *UPDATED, *UP, *STORE_ALL[1:], *DOWN, *TO_HOST, STEP]
    found = simulate(Schedule.of(actions, 2, resident=LATE_AT_HOST), HOSTED)
    assert found.makespan_seconds == 3 + 4
    lost = [*actions[:-4], Free(Value(GRADIENT, 0), DEVICE), STEP]
    refused(
        lost, len(lost), "GRADIENT 0 is nowhere at the end; at the start of the step it was: HOST", HOSTED, LATE_AT_HOST
    )
    again = [*actions, ON_HOST[0]]
    refused(again, len(actions), "updated already", HOSTED, LATE_AT_HOST)
    after_a_run = [FORWARD, *UP, Record(0), ON_HOST[0]]
    refused(after_a_run, 6, "Backward(0) still uses block 0", HOSTED, LATE_AT_HOST)
    not_freed = [FORWARD, *ON_HOST, *UP, *STORE_ALL[1:5]]
    refused(not_freed, len(not_freed) - 1, "would be overwritten instead", HOSTED, LATE_AT_HOST)


def test_updates_on_the_host_run_one_after_the_other() -> None:
    blocks = (*HOSTED.blocks, replace(HOSTED.blocks[0], update_extra_nbytes=20))
    profile = replace(HOSTED, blocks=blocks, stages=(HOSTED.stages[0], replace(HOSTED.stages[0], block=1)))
    both = [(Value(value.kind, block), tier) for value, tier in LATE_AT_HOST for block in (0, 1)]
    actions: list[Action] = [FORWARD, Update(0, 0, HOST), Update(1, 0, HOST)]
    for block in (0, 1):
        actions += [Wait(Value(PARAMETERS, block), HOST), Free(Value(GRADIENT, block), HOST)]
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule.of(actions, 2, resident=both), profile, Machine())
    assert "the live state must be 2" in str(caught.value)
    forward: list[Action] = []
    for value in (Value(kind, block) for block in (0, 1) for kind in (PARAMETERS, Kind.BUFFERS)):
        forward += [Prefetch(value, HOST, DEVICE), Wait(value, DEVICE)]
    backward = [BACKWARD, Backward(1), Backward(0)]
    for block in (1, 0):
        backward += [Free(Value(kind, block), DEVICE) for kind in (PARAMETERS, Kind.BUFFERS)]
        backward += [*saves(GRADIENT, block), Free(Value(GRADIENT, block), DEVICE)]
    found = simulate(
        Schedule.of([*actions, *forward, Record(0), Record(1), *backward, STEP], 2, resident=both), profile
    )
    assert found.makespan_seconds == 6 + 4
    assert found.peak_nbytes[HOST] == 2 * 4050 + 20


PARTED = replace(BLOCKS, blocks=(replace(BLOCKS.blocks[0], state_parts=(1200, 800), update_seconds=5.0),))
PARTS = tuple(Value(OPTIMIZER, 0, part) for part in range(2))
PARTED_AT_HOST = (*AT_HOST[:2], *((part, HOST) for part in PARTS))


def by_parts(*parts: int) -> list[Action]:
    """On the device, the state of each part brought for its update and sent home after it."""
    actions: list[Action] = [*WHOLE]
    for part in parts:
        value = PARTS[part]
        actions += [Prefetch(value, HOST, DEVICE), Wait(value, DEVICE), Update(0, part)]
        actions += [Offload(value, DEVICE, HOST), Wait(value, HOST), Free(value, DEVICE)]
    return [*actions, *saves(PARAMETERS), *DOWN, Free(Value(GRADIENT, 0), DEVICE)]


def test_parts_come_and_go_one_after_the_other() -> None:
    found = simulate(Schedule.of(by_parts(0, 1), 2, resident=PARTED_AT_HOST), PARTED)
    # Parameters, buffers and gradient, the larger part, the update's transients, and cotangent 0.
    assert found.peak_nbytes[DEVICE] == 1050 + 1000 + 1200 + 7 + 10
    assert found.bytes_moved == {(HOST, DEVICE): 1050 + 2000, (DEVICE, HOST): 1000 + 2000}
    assert found.compute_seconds == 4 + 5


@pytest.mark.parametrize(
    ("actions", "position", "text"),
    [
        (by_parts(1), 12, "the parts of block 0 are updated in order, once each; 0 is next"),
        (by_parts(0, 0), 18, "the parts of block 0 are updated in order, once each; 1 is next"),
        (by_parts(0), 21, "only 1 of the 2 parts of block 0 were updated"),
        ([*WHOLE, Update(0, 2)], 10, "there is no OPTIMIZER_STATE 0 part 2: the profile has 1 of this kind"),
        ([*WHOLE, Update(0)], 10, "OPTIMIZER_STATE 0 is current in HOST"),
        ([FORWARD, Prefetch(Value(PARAMETERS, 0, 1), HOST, DEVICE)], 1, "there is no PARAMETERS 0 part 1"),
    ],
)
def test_broken_rule_of_parts(actions: list[Action], position: int, text: str) -> None:
    refused(actions, position, text, profile=PARTED, resident=PARTED_AT_HOST)


def test_parts_that_do_not_add_up() -> None:
    with pytest.raises(InputError, match=r"state_parts=\(1, 2\) add up to 3 bytes"):
        BlockCost(1, 1, 2, state_parts=(1, 2))


def test_gradients_stay_where_they_are_without_a_step() -> None:
    simulate(Schedule.of(STORE_ALL, 2, resident=AT_DEVICE), BLOCKS)
    simulate(
        Schedule.of([*STORE_ALL, *saves(GRADIENT), Free(Value(GRADIENT, 0), DEVICE)], 2, resident=AT_DEVICE), BLOCKS
    )


def test_accumulated_gradient_goes_back_where_it_was() -> None:
    resident = (*AT_DEVICE, (Value(GRADIENT, 0), HOST))
    adds = [FORWARD, *brings(GRADIENT), *STORE_ALL[1:]]
    refused(adds, 8, "stale in HOST at the end", BLOCKS, resident)
    refused(STORE_ALL, 4, "would be overwritten", BLOCKS, resident)
    simulate(Schedule.of([*adds, *TO_HOST], 2, resident=resident), BLOCKS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(Value(STATE, 0), "resident names STATE 0"), (Value(PARAMETERS, 1), "there is no PARAMETERS 1")],
)
def test_resident_names_only_blocks(value: Value, text: str) -> None:
    refused(STORE_ALL, 0, text, BLOCKS, ((value, HOST),))


def test_resident_twice() -> None:
    refused(STORE_ALL, 0, "twice", BLOCKS, (AT_HOST[0], AT_HOST[0]))


def test_schedule_and_profile_of_different_length() -> None:
    with pytest.raises(InputError, match="for 1 stages and the profile has 2"):
        simulate(Schedule.of([FORWARD, Forward(0, 1)], 1), PLAIN)


def test_missing_link() -> None:
    actions = [FORWARD, *saves(STATE), Free(Value(STATE, 0), HOST), Forward(0, 2)]
    simulate(Schedule.of(actions, 2), PLAIN, Machine({(DEVICE, HOST): Link(1)}))
    with pytest.raises(InputError, match="no link from DEVICE to HOST"):
        simulate(Schedule.of(actions, 2), PLAIN, Machine({(HOST, DEVICE): Link(1)}))


def test_message_shows_three_actions_around() -> None:
    actions = [FORWARD, Keep(0), Forward(0, 1), Restore(0), Record(1), Forward(0, 1), Forward(1, 2), Keep(2), Keep(2)]
    with pytest.raises(ScheduleError) as caught:
        simulate(Schedule.of(actions, 2, planner="mine"), PLAIN)
    assert str(caught.value).splitlines() == [
        "action 4, Record(1) (planner mine): the live state must be 1 and is 0; put Restore(1) before",
        "    1: Keep(0)",
        "    2: Forward(0, 1)",
        "    3: Restore(0)",
        "  > 4: Record(1)",
        "    5: Forward(0, 1)",
        "    6: Forward(1, 2)",
        "    7: Keep(2)",
    ]


def test_abandoned_record_releases_what_the_tape_held() -> None:
    again = [Restore(0), Record(0), Record(1), Free(Value(STATE, 0), DEVICE)]
    actions = [FORWARD, Keep(0), Record(0), Free(Value(SAVED, 0), DEVICE), *again, *STORE_ALL[3:]]
    assert simulate(Schedule.of(actions, 2), PLAIN).recorded == 3


def test_carried_storage_counts_once() -> None:
    profile = Profile(tuple(StageCost(1, 1, 10, 100) for _ in range(2)), 10, carried=(Carried(0, 1, 5000),))
    # At the turn: states 0 and 1 by the tape, 2 live, the storage once, two saved, one cotangent.
    assert simulate(Schedule.of(STORE_ALL, 2), profile).peak_nbytes[DEVICE] == 30 + 5000 + 200 + 10
    # A copy elsewhere takes the storage along.
    actions = [FORWARD, *saves(STATE), Forward(0, 2), Free(Value(STATE, 0), HOST)]
    found = simulate(Schedule.of(actions, 2), profile)
    assert found.peak_nbytes == {DEVICE: 5020, HOST: 5010, DISK: 0}
