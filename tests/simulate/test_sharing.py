"""Storages that states and saved tensors share count once: by the judge as by looking at every holder of each."""

import random
from dataclasses import replace

import pytest

from tapestream.costs import Budget, Profile, SharedStorage, Sharing, StageCost
from tapestream.errors import BudgetError, InputError, ScheduleError
from tapestream.ir import Backward, Kind, Offload, Phase, PhaseKind, Record, Schedule, Series, Tier, Value
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.planning.plan_file import profile_from_json, profile_to_json
from tapestream.simulate import device_nbytes, simulate
from tapestream.simulate.sharing import Once


def drawn(draw: random.Random, stages: int) -> list[SharedStorage]:
    found = []
    for _ in range(draw.randint(1, 12)):
        first = draw.randint(0, stages)
        last = draw.randint(first, stages)
        tapes = [k for k in range(max(0, first - 1), min(stages, last + 1)) if draw.random() < 0.5]
        found.append(SharedStorage(first, last, draw.randint(1, 99), tuple(tapes)))
    return found


@pytest.mark.parametrize("seed", range(50))
def test_what_comes_and_goes_is_what_holders_say(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 9)
    storages = drawn(draw, stages)
    once, states, tapes = Once(storages, stages), set[int](), set[int]()

    def excess() -> int:
        found = 0
        for one in storages:
            holders = sum(one.first <= k <= one.last for k in states) + sum(k in tapes for k in one.tapes)
            found += max(0, holders - 1) * one.nbytes
        return found

    for _ in range(200):
        before = excess()
        if draw.random() < 0.6:
            k = draw.randint(0, stages)
            more = once.release(k) if k in states else -once.hold(k)
            states ^= {k}
        else:
            k = draw.randrange(stages)
            more = once.forget(k) if k in tapes else -once.record(k)
            tapes ^= {k}
        assert before - excess() == more
        assert once.nbytes == excess()


def test_what_is_made_again_while_it_is_there_is_there_twice() -> None:
    once = Once([SharedStorage(1, 3, 10, (2,))], 3)
    assert once.hold(1) == 0
    assert once.record(2) == 10
    assert once.release(1) == 10  # the saved tensors still have it
    assert once.made(1) == -10  # another run makes it beside that
    assert once.hold(1) == 10
    assert once.forget(2) == 10
    assert once.release(1) == -10  # both go


STAGES = tuple(StageCost(1.0, 2.0, 100, 60, reads_input=False) for _ in range(2))
APART = tuple(replace(cost, saved_nbytes=20, reads_input=True) for cost in STAGES)
PROFILE = Profile(STAGES, 0, shared=Sharing((SharedStorage(1, 2, 40, (1,)),), APART))
STORED = (
    *(Phase(PhaseKind.FORWARD), Record(0), Record(1)),
    *(Phase(PhaseKind.BACKWARD), Backward(1), Backward(0)),
)


def test_the_judge_counts_each_storage_once() -> None:
    found = device_nbytes(Schedule(Series(STORED), 2), PROFILE)
    # State 1 and the saved tensors of stage 0; with state 2 and those of stage 1, of 60 and 20 beside it; at the turn
    # without state 1, of which 40 stay; with two cotangents; with one.
    assert found == [0, 100 + 60, 160 + 60 + 20, 180 + 100, 60 + 60 + 2 * 100, 60 + 100]


def test_what_fills_a_device_adds_up() -> None:
    plan = Plan.judged(Schedule(Series(STORED), 2), PROFILE, Budget(320), None)
    assert sum(plan.fills.values()) == plan.peak_nbytes == 320
    assert min(plan.fills.values()) >= 0


def test_nothing_is_copied() -> None:
    actions = (*STORED[:3], Offload(Value(Kind.SAVED, 0), Tier.DEVICE, Tier.HOST), *STORED[3:])
    with pytest.raises(ScheduleError, match="SAVED 0 shares storages"):
        simulate(Schedule(Series(actions), 2), PROFILE)


def test_a_profile_whose_values_share_storages_has_no_blocks() -> None:
    with pytest.raises(InputError, match="shared="):
        Profile(STAGES[:1], 0, shared=PROFILE.shared)
    with pytest.raises(InputError, match="beyond the last of 2 stages"):
        Sharing((SharedStorage(1, 2, 40, (2,)),), APART)


def of_storages(draw: random.Random, stages: int) -> Profile:
    """A chain that makes, hands on and saves storages, each at some stage: what a stage takes is what is there then."""
    made = [(draw.randint(0, stages - 1), draw.randint(10, 99)) for _ in range(3 * stages)]
    storages = list[SharedStorage]()
    states, saved = [0] * (stages + 1), [0] * stages
    for at, nbytes in made:
        last = min(stages, at + draw.choice((0, 1, 1, 1, 2, stages)))
        tapes = [k for k in range(at, min(stages, last + 1)) if draw.random() < 0.6]
        for k in range(at + 1, last + 1):
            states[k] += nbytes
        for k in tapes:
            saved[k] += nbytes
        if last > at and last - at + len(tapes) > 1:
            storages.append(SharedStorage(at + 1, last, nbytes, tuple(tapes)))
    costs = [StageCost(1.0, 2.0, states[k + 1], saved[k], reads_input=False) for k in range(stages)]
    return Profile(tuple(costs), 0, shared=Sharing(tuple(storages), tuple(costs)))


@pytest.mark.parametrize("seed", range(8))
def test_plans_use_the_bytes_that_are_counted_once(seed: int) -> None:
    """Within every budget that works, and not slower than what each value counted by itself leads to."""
    profile = of_storages(random.Random(seed), 12)
    with pytest.raises(BudgetError) as refused:
        make_plan(profile, 1)
    least = refused.value.least_nbytes
    with pytest.raises(BudgetError) as refused:
        make_plan(profile.apart, 1)
    apart = refused.value.least_nbytes
    assert least is not None
    assert apart is not None
    assert least <= apart
    before = float("inf")
    for part in range(5):
        budget = least + (apart - least) * part // 2
        plan = make_plan(profile, budget)
        assert plan.peak_nbytes <= budget
        if budget >= apart:
            assert plan.seconds <= make_plan(profile.apart, budget).seconds
        before = min(before, plan.seconds)
    assert make_plan(profile).seconds <= before


def test_it_is_written_to_files() -> None:
    assert profile_from_json(profile_to_json(PROFILE)) == PROFILE
