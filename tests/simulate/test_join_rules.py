"""The judge on branches that meet: what counts when, and each rule broken once."""

import pytest

from tapestream.costs import Carried, Profile, StageCost
from tapestream.errors import ScheduleError
from tapestream.ir import Backward, Forward, Free, Keep, Kind, Phase, PhaseKind, Record, Restore, Schedule, Tier, Value
from tapestream.simulate import simulate

FORWARD, BACKWARD, STEP = (Phase(kind) for kind in PhaseKind)
FIRST = Profile((StageCost(1.0, 2.0, 10, 100, forward_extra_nbytes=3), StageCost(1.0, 2.0, 20, 200)), 5)
SECOND = Profile((StageCost(4.0, 8.0, 40, 400, cotangent_nbytes=70),), 7, carried=(Carried(0, 1, 1000),))
JOIN = Profile.join([FIRST, SECOND], turn_nbytes=9, turn_seconds=0.5)  # states 0 1 2 and 3 4; there is no stage 2


def freed(k):
    return Free(Value(Kind.STATE, k), Tier.DEVICE)


ACROSS = [Keep(2), Restore(3), freed(3)]
GOOD = [FORWARD, Record(0), Record(1), *ACROSS, Record(3), BACKWARD, Backward(1), Backward(3), Backward(0)]


def judged(actions):
    return simulate(Schedule.of(actions, 4), JOIN)


def test_the_numbers():
    found = judged(GOOD)
    assert (found.forwards, found.recorded, found.backwards) == (3, 3, 3)
    assert found.makespan_seconds == 2 * 3.0 + 12.0 + 0.5
    # At the turn: inputs and records of all, both last states and both cotangents.
    assert found.peak_nbytes[Tier.DEVICE] == (5 + 100 + 10 + 200) + (1000 + 7 + 400) + (20 + 40) + (20 + 70) + 9
    assert found.peak_position[Tier.DEVICE] == GOOD.index(BACKWARD)


def test_inputs_of_other_branches_count_from_the_start():
    forwards = [FORWARD, Keep(0), Forward(0, 2), Keep(2), Restore(3), Forward(3, 4), BACKWARD, Restore(3), freed(3)]
    back = [Record(3), Backward(3), Restore(0), Record(0), Record(1), freed(0), Backward(1), Backward(0), STEP]
    found = judged([*forwards, *back])
    assert found.forwards == 6
    at_first = [nbytes for seconds, nbytes in found.timeline.memory[Tier.DEVICE] if seconds == 0]
    assert at_first[0] == 5 + (7 + 1000)
    assert max(at_first) == at_first[0] + 10 + 3  # stage 0 runs


BROKEN = {
    "across the end": ([FORWARD, Forward(0, 4)], 1, r"state 2 is the last of its branch; put Restore\(3\) before"),
    "no such stage": ([FORWARD, Forward(0, 2), Record(2)], 2, "there is no stage 2: state 2 is the last of its branch"),
    "other branch not run": ([FORWARD, Record(0), Record(1), BACKWARD], 3, "the last of a branch and 4 be kept"),
    "output not kept": (
        [*GOOD[:3], Restore(3), freed(3), Record(3), BACKWARD],
        6,
        "the last of a branch and 2 be kept",
    ),
    "too early": ([*GOOD[:8], Backward(0)], 8, r"backwards run 1, 0, .., 0, each once; Backward\(1\) is next"),
    "twice": ([*GOOD, Backward(3)], 11, "backwards run 3, 2, .., 3, each once"),
    "one missing": (GOOD[:-1], 10, "stage 0 is still recorded; put Backward"),
    "input left over": ([a for a in GOOD if a != freed(3)], 10, "state 3 is still kept"),
    "forward only": ([FORWARD, Forward(0, 2), *ACROSS, Forward(3, 4), freed(2)], 7, "no schedule without Phase"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule(name):
    actions, position, rule = BROKEN[name]
    with pytest.raises(ScheduleError, match=rule) as caught:
        judged(actions)
    assert caught.value.position == position


def test_a_chain_is_judged_as_before():
    one = Profile.join([FIRST])
    assert one == FIRST
    assert one.spans == ((0, 2),)
    assert one.runs == len(one) == 2
    assert JOIN.runs == 3
    assert JOIN.spans == ((0, 2), (3, 4))
    assert JOIN.branches == (FIRST, SECOND)
