"""`joint`: never slower than those that compete, near the optimum of all overlapped schedules, and what POFO claims."""

from itertools import pairwise
from random import Random

import pytest
from chains import chains
from competing import COMPETING
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapped import Search
from tiers import machine

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Kind, Offload, Prefetch, Tier
from tapestream.planners import least_seconds, planners
from tapestream.simulate import simulate

joint = planners["joint"]
DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
OTHERS = [name for name in COMPETING if name not in ("joint", "join")]


def seconds_of(name, profile, budget, links, **knobs):
    """Judged within ``budget``; None where the planner does not apply or nothing fits."""
    try:
        schedule = planners[name](profile, budget, links, **knobs)
    except (BudgetError, InputError):
        return None
    return simulate(schedule, profile, links, budget).makespan_seconds


def least_device(profile, links, host=None):
    try:
        joint(profile, Budget(1, host=host), links)
    except BudgetError as error:
        return error.least_nbytes
    return 1


MACHINES = (
    None,
    Machine(),
    machine((1,), (2,)),
    machine((0.3, 1), (0.2, 1)),
    Machine({(DISK, DEVICE): Link(2.0, 0.5, 1.0), (DEVICE, DISK): Link(1.0, 0.0, 0.5)}),
    Machine({pair: Link(4.0) for a in (DEVICE, DISK) for pair in ((a, HOST), (HOST, a))}),
)


@settings(max_examples=15, deadline=None)
@given(
    profile=chains(most=9), equal=st.booleans(), links=st.sampled_from(MACHINES), share=st.floats(0.1, 1.1),
    host=st.sampled_from((None, None, 0, 9)),
)  # fmt: skip
def test_never_slower_than_planners_that_compete_and_within_every_tier(profile, equal, links, share, host):
    if equal:
        profile = Profile(UniformStages(profile.stages[0], 4 * len(profile)), profile.stages[0].output_nbytes)
    full = simulate(planners["store_all"](profile), profile)
    least = least_device(profile, links, host)
    device = max(1, least or 1, round(full.peak_nbytes[DEVICE] * share))
    budget = Budget(device, host=host)
    found = seconds_of("joint", profile, budget, links)
    assert found is not None
    assert full.makespan_seconds <= found
    assert least_seconds(profile, budget, links) <= found * (1 + 1e-9)
    for name in OTHERS:
        other = seconds_of(name, profile, budget, links)
        assert other is None or found <= other, name


def decided(random, n, most):
    """Whether a search over at most ``most`` positions shows that no schedule is faster by more than 3%."""
    profile = small(n, random)
    links = machine(*[(random.choice((0.5, 1, 2)),)] * 2)
    full, least = simulate(planners["store_all"](profile), profile), least_device(profile, Machine())
    budget = least + int((full.peak_nbytes[DEVICE] - least) * random.uniform(0.2, 1.0))
    found = simulate(joint(profile, budget, links), profile, links, Budget(budget)).makespan_seconds
    try:
        faster = Search(profile, budget, links).least(found / 1.03, most=most)
    except RuntimeError:
        return False
    assert faster is None, f"{n} stages, {budget} bytes: {faster} seconds are possible, {found} were found"
    return True


def test_within_three_percent_of_all_schedules_with_overlap():
    """Chains of 4 to 7 stages for which the exhaustive search ends soon: no schedule is faster by more than 3%."""
    random = Random(5)
    assert sum(decided(random, n, 2500) for n in (4, 4, 4, 5, 5, 5, 6, 6, 7, 7) * 2) >= 12


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [11, 12, 13, 14, 15, 16])
def test_within_three_percent_of_all_schedules_with_overlap_on_many_more(seed):
    random = Random(seed)
    assert sum(decided(random, n, 20_000) for n in (4, 4, 5, 5, 6, 7) * 20) >= 90


def slower_with_more(random, stages, levels):
    """Budgets, from the least to that of everything stored, at which a chain takes longer than with less."""
    profile = small(random.choice(stages), random)
    links = machine(*[(random.choice((0.5, 1, 2)),)] * 2)
    full, least = simulate(planners["store_all"](profile), profile), least_device(profile, Machine())
    budgets = sorted({least + (full.peak_nbytes[DEVICE] - least) * k // levels for k in range(levels + 1)})
    seconds = [simulate(joint(profile, b, links), profile, links, Budget(b)).makespan_seconds for b in budgets]
    return [b for (less, more), b in zip(pairwise(seconds), budgets[1:], strict=True) if more > less + 1e-9]


def test_more_budget_is_never_slower():
    random = Random(4)
    assert not any(slower_with_more(random, (4, 5, 6, 8), 4) for _ in range(3))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_more_budget_is_never_slower_on_many_more():
    random = Random(4)
    assert not any(slower_with_more(random, (4, 5, 6, 8, 9, 12), 20) for _ in range(60))


def test_a_value_leaves_while_it_is_read():
    """State 1 is on its way out during the stage that reads it: 20 seconds, not 21."""
    figures = ((2, 3, 4, 7), (1, 2, 1, 8), (1, 5, 3, 4), (2, 2, 1, 9))
    stages = tuple(StageCost(float(f), float(b), out, saved) for f, b, out, saved in figures)
    profile, links = Profile(stages, 3, turn_nbytes=4), machine((1,), (1,))
    assert simulate(joint(profile, 31, links), profile, links, Budget(31)).makespan_seconds == 20.0


def test_recomputes_while_a_copy_comes_in():
    """Stage 0 is recorded again before stage 3 runs backward, while the record of stage 2 comes in: 45, not 47."""
    figures = ((5, 1, 2, 12), (5, 3, 3, 9), (3, 2, 4, 6), (5, 5, 6, 4), (2, 1, 1, 7), (4, 1, 5, 11))
    stages = tuple(StageCost(float(f), float(b), out, saved) for f, b, out, saved in figures)
    profile, links = Profile(stages, 2, turn_nbytes=4), machine((2,), (2,))
    assert simulate(joint(profile, 56, links), profile, links, Budget(56)).makespan_seconds == 45.0


def test_copies_out_in_the_order_in_which_their_room_is_needed():
    """The second value to leave must be gone first: 24 seconds are the least, 25 what leaving in order of use gives."""
    figures = ((2, 2, 4, 11), (1, 1, 2, 10), (3, 3, 1, 12), (5, 6, 3, 9))
    profile = Profile(tuple(StageCost(float(f), float(b), out, saved) for f, b, out, saved in figures), 5)
    links = machine((0.5,), (0.5,))
    found = simulate(joint(profile, 45, links), profile, links, Budget(45)).makespan_seconds
    assert found <= 24.5


def test_the_last_stage_need_not_be_recorded_before_the_turn():
    """It takes room that the turn needs, and its second forward less time than copies would: 31 seconds, not 33."""
    figures = ((5, 3, 6, 6), (5, 1, 4, 4), (1, 2, 1, 6), (4, 2, 4, 9))
    stages = tuple(StageCost(float(f), float(b), out, saved) for f, b, out, saved in figures)
    profile, links = Profile(stages, 0, turn_nbytes=4), machine((0.5,), (0.5,))
    assert simulate(joint(profile, 25, links), profile, links, Budget(25)).makespan_seconds == 31.0


def small(n, random):
    size = random.randint
    stages = [StageCost(float(size(1, 5)), float(size(1, 6)), size(1, 6), size(1, 12)) for _ in range(n)]
    return Profile(tuple(stages), size(0, 6), turn_nbytes=random.choice((0, 0, 4)))


def test_the_search_knows_what_moving_gives():
    """Two records of 4 bytes, room for one beside the states: the first leaves behind the second forward."""
    profile = Profile((StageCost(4.0, 4.0, 0, 4), StageCost(4.0, 4.0, 0, 4)), 0)
    assert Search(profile, 8, machine((1,), (1,))).least() == 16.0
    assert Search(profile, 4, machine((1,), (1,))).least() == 20.0  # a recompute is as good as waiting for a copy
    assert Search(profile, 4, machine((9,), (9,))).least() == 20.0
    assert Search(profile, 3, machine((1,), (1,))).least() is None


GIB = 2**30
PCIE_4 = Machine({(DEVICE, HOST): Link(25e9, 1e-5), (HOST, DEVICE): Link(25e9, 1e-5)})


def gpt(layers=32, width=4096, tokens=8192, flops=150e12):
    """bf16 blocks on a GPU that reaches half of its 312 TFLOP/s: 24 T h^2 FLOP, 34 T h bytes saved, states of 2 T h."""
    forward, state = 24 * tokens * width**2 / flops, 2 * tokens * width
    block = StageCost(forward, 2 * forward, state, 34 * tokens * width - state, backward_extra_nbytes=2 * state)
    return Profile((block,) * layers, state, turn_nbytes=4 * tokens * 32_000, turn_seconds=forward / 4)


def resnet_50(batch=64, flops=14e12):
    """fp32 on a GPU of 19.5 TFLOP/s, a stage for each convolution with what follows it; the shortcut is part of the
    states inside a bottleneck, and every convolution's and normalisation's input is saved."""
    stages = []
    for width, side, blocks in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
        pixels = batch * side * side
        inner = ((5 * width, 4 * width**2, 2 * width), (5 * width, 9 * width**2, 2 * width))
        for state, work, saved in (*inner, (4 * width, 4 * width**2, 8 * width)) * blocks:
            forward = 2 * pixels * work / flops
            stages.append(StageCost(forward, 2 * forward, 4 * state * pixels, 4 * saved * pixels))
    return Profile(tuple(stages), 4 * 64 * 56 * 56 * batch)


@pytest.mark.parametrize(("profile", "share"), [(gpt(), 4), (gpt(), 6), (resnet_50(), 4)])
def test_a_quarter_and_a_sixth_of_the_memory_cost_a_fifth_at_most(profile, share):
    full = simulate(planners["store_all"](profile), profile)
    budget = Budget(full.peak_nbytes[DEVICE] // share)
    together = simulate(joint(profile, budget, PCIE_4), profile, PCIE_4, budget).makespan_seconds
    assert together <= 1.2 * full.makespan_seconds
    if profile == gpt():  # in the other most bytes are states that the tape holds, and these cannot be moved
        alone = simulate(planners["rotor"](profile, budget), profile, None, budget).makespan_seconds
        assert together - full.makespan_seconds <= 2 / 3 * (alone - full.makespan_seconds)


def test_long_chains_move_by_runs_of_stages():
    """130 stages, planned as 64 runs: each run's saved tensors move stage by stage."""
    stages = tuple(StageCost(1.0 + k % 3, 2.0, 10 + k % 7, 60 + k % 50) for k in range(130))
    profile, links = Profile(stages, 10), machine((0.03,), (0.03,))
    full = simulate(planners["store_all"](profile), profile)
    budget = Budget(full.peak_nbytes[DEVICE] // 3)
    schedule = joint(profile, budget, links)
    found = simulate(schedule, profile, links, budget)
    alone = simulate(planners["rotor"](profile, budget), profile, None, budget)
    assert sum(isinstance(a, Offload) and a.value.kind is Kind.SAVED for a in schedule) > 20
    assert found.makespan_seconds - full.makespan_seconds < 0.7 * (alone.makespan_seconds - full.makespan_seconds)
    assert (
        least_seconds(profile, budget, links) <= found.makespan_seconds <= 1.1 * least_seconds(profile, budget, links)
    )


def test_moves_says_what_may_be_moved():
    profile, links = gpt(12), PCIE_4
    budget = Budget(simulate(planners["store_all"](profile), profile).peak_nbytes[DEVICE] // 4)
    kinds = {}
    for moves in ("all", "states", "none"):
        schedule = joint(profile, budget, links, moves=moves)
        kinds[moves] = {action.value.kind for action in schedule if isinstance(action, Offload | Prefetch)}
        simulate(schedule, profile, links, budget)
    assert Kind.SAVED in kinds["all"]
    assert kinds["states"] <= {Kind.STATE}
    assert not kinds["none"]


def test_a_stage_whose_parameters_arrive_slowly_is_not_recomputed():
    """Equal seconds, but the first half has parameters that take ten times as long over the link."""
    stages = tuple(StageCost(1.0, 1.0, 1, 9, block=k) for k in range(8))
    blocks = tuple(BlockCost(1000 if k < 4 else 1) for k in range(8))
    links = machine((0.01,), (0.01,))
    again = [0] * 8
    for action in joint(Profile(stages, 1, blocks), 52, links, moves="none"):
        if isinstance(action, Forward):
            for k in range(action.start, action.stop):
                again[k] += 1
    assert sum(again[:4]) < sum(again[4:])


def test_the_bound_is_reached_where_nothing_needs_to_run_twice():
    profile = gpt(12)
    full = simulate(planners["store_all"](profile), profile)
    assert least_seconds(profile) == pytest.approx(full.makespan_seconds)
    assert least_seconds(profile, 10**9, None) == pytest.approx(full.makespan_seconds)
    uniform = Profile(UniformStages(profile.stages[0], 12), profile.initial_nbytes, turn_nbytes=profile.turn_nbytes)
    tuple_of = Profile(tuple(uniform.stages), uniform.initial_nbytes, turn_nbytes=uniform.turn_nbytes)
    for share in (2, 4, 7):
        budget = full.peak_nbytes[DEVICE] // share
        one, other = (least_seconds(p, budget, Machine()) for p in (uniform, tuple_of))
        assert one <= other * (1 + 1e-9)
        assert one >= 0.98 * other


def test_bad_input():
    profile, links = gpt(4), PCIE_4
    with pytest.raises(InputError, match="moves is 'all', 'states' or 'none', not 'most'"):
        joint(profile, None, links, moves="most")
    with pytest.raises(InputError, match="'host' or 'disk', not 'cloud'"):
        joint(profile, GIB, links, tier="cloud")
    with pytest.raises(InputError, match="DISK is reached by way of HOST"):
        joint(profile, GIB, links, tier="disk")
    with pytest.raises(BudgetError, match=r"joint: no schedule fits; .* bytes") as caught:
        joint(profile, 1000, links)
    least = caught.value.least_nbytes
    assert simulate(joint(profile, least, links), profile, links).peak_nbytes[DEVICE] <= least
