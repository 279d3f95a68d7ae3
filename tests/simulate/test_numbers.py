"""Peaks, seconds and counts worked out by hand."""

from dataclasses import replace

import pytest

from tapestream.costs import Budget, Link, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import (
    MEMORIES,
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Value,
    Wait,
)
from tapestream.simulate import simulate
from tapestream.simulate.report import report

DEVICE, HOST, DISK = MEMORIES
FORWARD, BACKWARD = Phase(PhaseKind.FORWARD), Phase(PhaseKind.BACKWARD)


def state(k: int) -> Value:
    return Value(Kind.STATE, k)


def saved(k: int) -> Value:
    return Value(Kind.SAVED, k)


# A chain as rotor sees it: every stage different.
ROTOR = Profile(
    (
        StageCost(1, 2, 100, 30, forward_extra_nbytes=7, backward_extra_nbytes=70),
        StageCost(2, 3, 50, 500, reads_input=False, reads_output=True, cotangent_nbytes=40),
        StageCost(4, 8, 20, 60, backward_extra_nbytes=900),
    ),
    initial_nbytes=10,
    outside_nbytes=1000,
    turn_nbytes=200,
    turn_seconds=0.5,
)


def test_heterogeneous_chain_with_recompute() -> None:
    actions: list[Action] = [
        FORWARD,  # 10
        Keep(0),
        Forward(0, 1),  # 10 + 100 + 7 = 117, then 110
        Record(1),  # state 2 and saved 1: 110 + 50 + 500 = 660, then state 1 goes: 560
        Record(2),  # state 3, saved 2: 560 + 20 + 60 = 640 (state 2 held by both tapes)
        BACKWARD,  # cotangent 3 and the turn: 640 + 20 + 200 = 860, then state 3 goes: 640
        Backward(2),  # cotangent 2 and extra: 640 + 40 + 900 = 1580; then - 60 - 20: 600 (stage 1 holds state 2)
        Backward(1),  # cotangent 1: 600 + 100 = 700; then - 500 - 40 - 50: 110
        Restore(0),
        Record(0),  # state 1 and saved 0: 110 + 100 + 30 + 7 = 247, then 240
        Backward(
            0
        ),  # state 1 goes first: 140, cotangent 0 and extra: 140 + 10 + 70 = 220; then 20: state and cotangent 0
        Free(state(0), DEVICE),
    ]
    found = simulate(Schedule.of(actions, 3), ROTOR)
    assert found.peak_nbytes == {DEVICE: 1000 + 1580, HOST: 0, DISK: 0}
    assert found.peak_position[DEVICE] == 6
    assert (found.forwards, found.recorded, found.backwards) == (4, 3, 3)
    assert found.makespan_seconds == found.compute_seconds == 1 + 2 + 4 + 0.5 + 8 + 3 + 1 + 2
    assert found.phase_seconds == {PhaseKind.FORWARD: 7, PhaseKind.BACKWARD: 14.5}
    held = [nbytes - 1000 for _, nbytes in found.timeline.memory[DEVICE]]
    expected = [10, 117, 110, 660, 560, 640, 860, 640, 1580, 600, 700, 110, 247, 240, 220, 20, 10]
    assert held == [0, *expected][-len(held) :]
    assert len(held) == len(expected)


def test_budget_names_action_stage_and_least() -> None:
    actions = [FORWARD, *(Record(k) for k in range(3)), BACKWARD, *(Backward(k) for k in (2, 1, 0))]
    schedule = Schedule.of(actions, 3)
    peak = simulate(schedule, ROTOR).peak_nbytes[DEVICE]
    simulate(schedule, ROTOR, budget=Budget(peak))
    with pytest.raises(BudgetError, match=r"DEVICE.*action 5, Backward\(2\) in stage 2") as caught:
        simulate(schedule, ROTOR, budget=Budget(peak - 1))
    assert (caught.value.least_nbytes, caught.value.stage) == (peak, 2)


def test_budget_of_the_host() -> None:
    actions = [FORWARD, Offload(state(0), DEVICE, HOST), Wait(state(0), HOST), Free(state(0), HOST), Forward(0, 3)]
    with pytest.raises(BudgetError, match=r"HOST.*action 1, Offload\(STATE 0, DEVICE, HOST\)") as caught:
        simulate(Schedule.of(actions, 3), ROTOR, budget=Budget(host=9))
    assert (caught.value.least_nbytes, caught.value.stage) == (10, None)


def test_peak_inside_a_long_forward_names_its_stage() -> None:
    with pytest.raises(BudgetError) as caught:
        simulate(Schedule.of([FORWARD, Forward(0, 3)], 3), ROTOR, budget=Budget(1100))
    assert (caught.value.least_nbytes, caught.value.stage) == (1150, 1)


def test_forward_past_a_kept_state_counts_it_once() -> None:
    profile = Profile.uniform(6, state_nbytes=10)
    actions = [FORWARD, Keep(0), Forward(0, 3), Keep(3), Restore(0), Forward(0, 6)]
    actions += [Free(state(0), DEVICE), Free(state(3), DEVICE)]
    # States 0 and 3 kept, two more while stages 1 and 4 run.
    assert simulate(Schedule.of(actions, 6), profile).peak_nbytes[DEVICE] == 40


CHAIN = Profile(tuple(StageCost(1, 1, 10, 100) for _ in range(3)), 10)
OVERLAP: list[Action] = [
    FORWARD,
    Record(0),
    Offload(saved(0), DEVICE, HOST),
    Record(1),
    Record(2),
    Wait(saved(0), HOST),
    Free(saved(0), DEVICE),
    BACKWARD,
    Prefetch(saved(0), HOST, DEVICE),
    Backward(2),
    Backward(1),
    Wait(saved(0), DEVICE),
    Backward(0),
]


@pytest.mark.parametrize(
    ("rate", "latency", "stall"),
    [
        (100, 0.5, 0.0),  # 1.5 s behind 2 s
        (40, 0.0, 1.0),  # 2.5 s behind 2 s, twice
        (100, 3.0, 4.0),  # 4 s behind 2 s, twice
    ],
)
def test_copies_hide_behind_compute(rate: float, latency: float, stall: float) -> None:
    link = Link(rate, latency)
    found = simulate(Schedule.of(OVERLAP, 3), CHAIN, Machine({(DEVICE, HOST): link, (HOST, DEVICE): link}))
    assert found.stall_seconds == pytest.approx(stall)
    assert found.makespan_seconds == pytest.approx(6 + stall)
    assert found.bytes_moved == {(DEVICE, HOST): 100, (HOST, DEVICE): 100}
    assert found.peak_nbytes[HOST] == 100
    # At Backward(2): three saved, states 0, 1, 2 by the tape, two cotangents.
    assert found.peak_nbytes[DEVICE] == 350


def test_compute_stands_still_while_a_copy_is_started() -> None:
    link = Link(100, 0.5, busy_seconds=0.25)  # from then on 1.5 s behind 2 s
    found = simulate(Schedule.of(OVERLAP, 3), CHAIN, Machine({(DEVICE, HOST): link, (HOST, DEVICE): link}))
    assert found.stall_seconds == 0
    assert found.makespan_seconds == found.compute_seconds == 6 + 2 * 0.25
    assert [s.name for s in found.timeline.spans if s.duration_seconds == 0.25] == ["start SAVED 0"] * 2
    assert link.seconds(100) == 0.25 + 0.5 + 1
    thrice = replace(CHAIN, stages=(replace(CHAIN.stages[0], saved_storages=3), *CHAIN.stages[1:]))
    found = simulate(Schedule.of(OVERLAP, 3), thrice, Machine({(DEVICE, HOST): link, (HOST, DEVICE): link}))
    assert found.makespan_seconds == 6 + 2 * 3 * 0.25


def test_copies_take_no_time_without_a_machine() -> None:
    assert simulate(Schedule.of(OVERLAP, 3), CHAIN).makespan_seconds == 6


def test_one_lane_works_in_order_of_issue() -> None:
    actions: list[Action] = [
        FORWARD,
        Offload(state(0), DEVICE, HOST),
        Wait(state(0), HOST),  # till 1 s
        Record(0),  # till 2 s
        Keep(1),
        Offload(saved(0), DEVICE, HOST),  # 2 s .. 12 s
        Offload(state(1), DEVICE, HOST),  # 12 s .. 13 s
        Record(1),
        Record(2),
        BACKWARD,
        Wait(state(1), HOST),  # 9 s of stall
        Wait(saved(0), HOST),
        *(Backward(k) for k in (2, 1, 0)),
        *(Free(state(k), HOST) for k in (0, 1)),
        Free(state(1), DEVICE),
    ]
    found = simulate(Schedule.of(actions, 3), CHAIN, Machine({(DEVICE, HOST): Link(10)}))
    spans = {s.name: (s.start_seconds, s.duration_seconds) for s in found.timeline.spans if s.lane == "DEVICE to HOST"}
    assert spans == {"STATE 0": (0, 1), "SAVED 0": (2, 10), "STATE 1": (12, 1)}
    assert found.stall_seconds == 1 + 9


def test_opposite_lanes_slow_each_other_down() -> None:
    actions: list[Action] = [
        FORWARD,
        Offload(state(0), DEVICE, HOST),
        Wait(state(0), HOST),  # 10 bytes at 50/s: 0.2 s
        Forward(0, 1),  # till 1.2 s
        Record(1),  # till 2.2 s
        Offload(saved(1), DEVICE, HOST),  # 100 bytes from 2.2 s
        Prefetch(state(0), HOST, DEVICE),  # latency till 2.7 s, 10 bytes at 10/s till 3.7 s
        Wait(state(0), DEVICE),  # 1.5 s of stall; down: 30 bytes at 20/s meanwhile, then 70 at 50/s till 5.1 s
        Restore(0),
        Record(0),  # till 4.7 s
        Free(state(0), DEVICE),
        Free(state(0), HOST),
        Forward(1, 2),  # till 5.7 s
        Wait(saved(1), HOST),
        Free(saved(1), HOST),
        BACKWARD,
        Backward(1),
        Backward(0),
    ]
    machine = Machine({(DEVICE, HOST): Link(50, 0, 20), (HOST, DEVICE): Link(20, 0.5, 10)})
    profile = Profile(tuple(StageCost(1, 1, 10, 100) for _ in range(2)), 10)
    found = simulate(Schedule.of(actions, 2), profile, machine)
    assert found.stall_seconds == pytest.approx(0.2 + 1.5)
    assert found.makespan_seconds == pytest.approx(7.7)
    spans = {(s.lane, s.name): (s.start_seconds, s.duration_seconds) for s in found.timeline.spans}
    assert spans["DEVICE to HOST", "SAVED 1"] == pytest.approx((2.2, 2.9))
    assert spans["HOST to DEVICE", "STATE 0"] == pytest.approx((2.2, 1.5))
    assert spans["stall", "wait for STATE 0"] == pytest.approx((2.2, 1.5))


def test_report_golden() -> None:
    link = Link(40)
    found = simulate(Schedule.of(OVERLAP, 3), CHAIN, Machine({(DEVICE, HOST): link, (HOST, DEVICE): link}))
    assert report(found, Budget("1KiB")).splitlines() == [
        "peak in DEVICE  350 B (1.00 KiB allowed, 34% used), at action 9",
        "peak in HOST    100 B (no limit), at action 2",
        "makespan        7 s",
        "  forward       3.5 s",
        "  backward      3.5 s",
        "stalls          1 s (14% of the makespan)",
        "forward         3 stages, 3 of them recorded",
        "backward        3 stages",
        "DEVICE to HOST  100 B moved",
        "HOST to DEVICE  100 B moved",
    ]


def test_gradients_of_stages_stay() -> None:
    """The backward of stage 1 makes 5 bytes, that of stage 0 adds 7: in the end 12 beside cotangent 0."""
    costs = [StageCost(1, 1, 10, s, backward_extra_nbytes=2, gradient_nbytes=made) for s, made in ((3, 7), (8, 5))]
    actions = [FORWARD, Record(0), Record(1), BACKWARD, Backward(1), Backward(0)]
    simulation = simulate(Schedule.of(actions, 2), Profile(tuple(costs), 10, turn_seconds=1))
    memory = dict(simulation.timeline.memory[DEVICE])
    assert memory[5.0] == 10 + 12
    # Backward(1): states 0 and 1, both tapes, two cotangents, the transient bytes and its gradient.
    assert simulation.peak_nbytes[DEVICE] == 20 + 11 + 20 + 2 + 5
    assert simulation.peak_position[DEVICE] == 4


def test_a_stage_with_a_block_has_its_gradient_there() -> None:
    with pytest.raises(InputError, match="twice"):
        StageCost(1, 1, 10, 3, block=0, gradient_nbytes=7)
