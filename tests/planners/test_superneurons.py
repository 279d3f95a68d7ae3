"""SuperNeurons: AlexNet's published numbers, the tensor cache against brute force, any chain within every tier."""

from functools import cache as remembered
from itertools import pairwise

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import machine

from tapestream.costs import Budget, Machine, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Backward, Forward, Offload, Prefetch, Record, Tier
from tapestream.planners import planners
from tapestream.planners._cache import evicted
from tapestream.planners._heavy import peak_of_one_backward
from tapestream.simulate import simulate

plan = planners["superneurons"]

_FLOATS = 4 * 200  # bytes of one number in a batch of 200
_ALEXNET = (
    ("conv", 96 * 55 * 55), ("relu", 96 * 55 * 55), ("lrn", 96 * 55 * 55), ("pool", 96 * 27 * 27),
    ("conv", 256 * 27 * 27), ("relu", 256 * 27 * 27), ("lrn", 256 * 27 * 27), ("pool", 256 * 13 * 13),
    ("conv", 384 * 13 * 13), ("relu", 384 * 13 * 13), ("conv", 384 * 13 * 13), ("relu", 384 * 13 * 13),
    ("conv", 256 * 13 * 13), ("relu", 256 * 13 * 13), ("pool", 256 * 6 * 6),
    ("linear", 4096), ("relu", 4096), ("dropout", 4096), ("linear", 4096), ("relu", 4096), ("dropout", 4096),
    ("linear", 1000), ("softmax", 1000),
)  # fmt: skip
HEAVY = [k for k, (kind, _) in enumerate(_ALEXNET) if kind in ("conv", "linear")]


def alexnet():
    """Heavy layers ten times as slow, whose backward reads their input; that of the others input and output."""
    stages = []
    for kind, numbers in _ALEXNET:
        heavy = kind in ("conv", "linear")
        seconds = 10.0 if heavy else 1.0
        stages.append(StageCost(seconds, seconds, numbers * _FLOATS, 0, reads_output=not heavy))
    return Profile(tuple(stages), 3 * 227 * 227 * _FLOATS)


@pytest.mark.parametrize(("recompute", "extra"), [("speed", 14), ("memory", 23), ("cost_aware", 17)])
@pytest.mark.parametrize("heavy", [HEAVY, None])
def test_published_extra_forwards(recompute, extra, heavy):
    profile = alexnet()
    judged = simulate(plan(profile, recompute=recompute, heavy=heavy), profile)
    assert judged.forwards - len(profile) == extra


def test_published_largest_backward():
    """l_peak, and what is held at that moment besides: the restart checkpoint, and the image that it came from."""
    profile = alexnet()
    most = peak_of_one_backward(profile)
    assert round(most / 2**20, 2) == 886.23
    judged = simulate(plan(profile, recompute="cost_aware", heavy=HEAVY), profile)
    assert judged.peak_nbytes[Tier.DEVICE] == most + profile.state_nbytes(0) + profile.state_nbytes(1)
    assert judged.peak_nbytes[Tier.DEVICE] < simulate(planners["store_all"](profile), profile).peak_nbytes[Tier.DEVICE]


@pytest.mark.parametrize(("recompute", "extra"), [("memory", 23), ("cost_aware", 17)])
def test_the_least_peak_is_the_largest_backward_where_restart_checkpoints_move(recompute, extra):
    profile, links = alexnet(), machine((1e-9,), (1e-9,))
    knobs = {"recompute": recompute, "heavy": HEAVY}
    least = least_device(profile, None, links, **knobs)
    assert least == peak_of_one_backward(profile)
    schedule = plan(profile, Budget(least), links, **knobs)
    judged = simulate(schedule, profile, links, Budget(least))
    assert judged.forwards - len(profile) >= extra  # heavy stages are run again, too


def test_heavy_stages_run_once_where_their_tape_fits():
    profile = alexnet()
    for recompute in ("speed", "memory", "cost_aware"):
        runs = [0] * len(profile)
        for action in plan(profile, recompute=recompute):
            match action:
                case Forward(start, stop):
                    for k in range(start, stop):
                        runs[k] += 1
                case Record(stage):
                    runs[stage] += 1
        assert {runs[k] for k in HEAVY} == {1}
        assert all(runs[k] > 1 for k in range(22) if k not in HEAVY)


def test_modes_trade_memory_for_forwards():
    """Long segments of equal cheap stages with much to save: the tape of one does not fit beside another's state."""
    stages = tuple(StageCost(9.0 if k % 8 == 0 else 1.0, 1.0, 4, 0 if k % 8 == 0 else 20) for k in range(33))
    profile = Profile(stages, 4)
    found = {mode: simulate(plan(profile, recompute=mode), profile) for mode in ("speed", "memory", "cost_aware")}
    assert found["speed"].forwards < found["memory"].forwards
    assert found["speed"].peak_nbytes[Tier.DEVICE] > found["memory"].peak_nbytes[Tier.DEVICE]
    assert found["cost_aware"].peak_nbytes[Tier.DEVICE] == found["memory"].peak_nbytes[Tier.DEVICE]
    assert simulate(plan(profile), profile).forwards == found["speed"].forwards


def test_states_move_only_when_memory_runs_out():
    stages = tuple(StageCost(9.0 if k % 4 == 0 else 1.0, 2.0, 8, 0 if k % 4 == 0 else 2) for k in range(41))
    profile, links = Profile(stages, 8), machine((0.2,), (0.2,))
    roomy = simulate(plan(profile, None, links), profile, links)
    assert not roomy.bytes_moved
    full = roomy.peak_nbytes[Tier.DEVICE]
    tight = simulate(plan(profile, full - 20, links), profile, links, Budget(full - 20))
    tighter = simulate(plan(profile, full - 60, links), profile, links, Budget(full - 60))
    assert 0 < tight.bytes_moved[Tier.DEVICE, Tier.HOST] < tighter.bytes_moved[Tier.DEVICE, Tier.HOST]
    assert tight.forwards == tighter.forwards == roomy.forwards
    for action in (actions := list(plan(profile, full - 20, links))):
        if isinstance(action, Prefetch):
            assert isinstance(actions[actions.index(action) + 1], Backward)  # comes while another segment is reversed
    assert any(isinstance(action, Offload) for action in actions)


@pytest.mark.parametrize("policy", ["lru", "furthest"])
def test_on_a_chain_both_policies_evict_the_same(policy):
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    accesses = [*range(8), *reversed(range(8))]
    for capacity in range(33):
        assert evicted(sizes, accesses, capacity, policy) == evicted(sizes, accesses, capacity, "lru")
    assert evicted(sizes, accesses, 31, policy) == []
    assert evicted(sizes, accesses, 30, policy) == [0]
    assert evicted(sizes, accesses, 0, policy) == list(range(7))


def test_the_policies_differ_where_the_order_does():
    accesses = [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert len(evicted([1, 1, 1], accesses, 2, "lru")) == 5
    assert len(evicted([1, 1, 1], accesses, 2, "furthest")) == 3


@settings(max_examples=200, deadline=None)
@given(accesses=st.lists(st.integers(0, 4), max_size=12), capacity=st.integers(1, 4))
def test_furthest_next_use_is_optimal_for_equal_sizes(accesses, capacity):
    def live(held, at):
        return frozenset(value for value in held if value in accesses[at:])

    @remembered
    def fewest(at, held):
        if at == len(accesses):
            return 0
        value = accesses[at]
        if value in held or len(held) < capacity:
            return fewest(at + 1, live(held | {value}, at + 1))
        return 1 + min(fewest(at + 1, live(held - {out} | {value}, at + 1)) for out in held)

    assert len(evicted([1] * 5, accesses, capacity, "furthest")) == fewest(0, frozenset())
    assert len(evicted([1] * 5, accesses, capacity, "lru")) >= fewest(0, frozenset())


def least_device(profile, host, links, **knobs):
    """The least device budget by the planner's own word (a profile may need no byte at all)."""
    try:
        plan(profile, Budget(1, host=host), links, **knobs)
    except BudgetError as error:
        return error.least_nbytes
    return 1


@settings(max_examples=150, deadline=None)
@given(
    profile=chains(most=12), share=st.floats(0.1, 1.1), host=st.none() | st.integers(0, 40), data=st.data(),
    write=st.integers(0, 3), read=st.integers(0, 3),
)  # fmt: skip
def test_valid_within_every_tier_and_more_is_never_slower(profile, share, host, data, write, read):
    links = machine((write,), (read,))
    stages = st.lists(st.integers(0, len(profile) - 1), max_size=5)
    knobs = {
        "heavy": data.draw(st.none() | stages), "cache": data.draw(st.sampled_from(("lru", "furthest"))),
        "recompute": data.draw(st.sampled_from((None, "speed", "cost_aware", "memory"))),
    }  # fmt: skip
    full = simulate(planners["store_all"](profile), profile)
    device = max(1, round(full.peak_nbytes[Tier.DEVICE] * share))
    least = least_device(profile, host, links, **knobs)
    if least > 1:
        with pytest.raises(BudgetError):
            plan(profile, Budget(least - 1, host=host), links, **knobs)
    device = max(device, least)
    seconds = []
    for more in (0, 1, 6, 30, 10**6):
        budget = Budget(device + more, host=None if host is None else host + more)
        schedule = plan(profile, budget, links, **knobs)
        judged = simulate(schedule, profile, links, budget)
        assert judged.recorded == judged.backwards == len(profile)
        assert schedule.planner == "superneurons"
        seconds.append(judged.makespan_seconds)
    assert all(more <= less for less, more in pairwise(seconds))


def test_without_links_nothing_moves():
    profile = alexnet()
    assert not simulate(plan(profile, None, Machine()), profile, Machine()).bytes_moved
    with pytest.raises(InputError, match="no link from DEVICE to HOST"):
        plan(profile, None, Machine(), tier="host")


def test_bad_input():
    profile = Profile.uniform(9)
    with pytest.raises(InputError, match="recompute is 'speed', 'cost_aware', 'memory' or None, not 'fast'"):
        plan(profile, recompute="fast")
    with pytest.raises(InputError, match="cache is 'furthest' or 'lru', not 'fifo'"):
        plan(profile, cache="fifo")
    for bad in (9, -1, True, 1.5):
        with pytest.raises(InputError, match=r"heavy names stages 0 \.\. 8, not"):
            plan(profile, heavy=[3, bad])
    with pytest.raises(InputError, match=r"heavy is a list of stages, not 3; write heavy=\[3\]"):
        plan(profile, heavy=3)
