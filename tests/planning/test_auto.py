"""`make_plan`: never worse than any candidate, honest about what does not fit."""

from itertools import pairwise

import pytest
from competing import COMPETING
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Kind, Tier, Value
from tapestream.planners import planners
from tapestream.planning.auto import CANDIDATES, candidates, make_plan
from tapestream.simulate import simulate

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
NEAR = {(HOST, DEVICE): Link(20.0, 0.01, busy_seconds=0.3), (DEVICE, HOST): Link(15.0, 0.01)}
FAR = {(DISK, HOST): Link(6.0, 0.1, 2.0), (HOST, DISK): Link(4.0, 0.1, 2.0)}
MACHINES = (
    Machine(NEAR),
    Machine({**NEAR, **FAR}),
    Machine({(DISK, DEVICE): Link(8.0, 0.0, 2.0), (DEVICE, DISK): Link(6.0, 0.0, 2.0)}),
)


@st.composite
def profiles(draw: st.DrawFn, blocks: bool = True) -> Profile:
    count = draw(st.integers(1, 4)) if blocks else 0
    costs = tuple(
        BlockCost(p, draw(st.sampled_from((0, p))), draw(st.sampled_from((0, 2 * p))), draw(st.integers(0, 2)), 0.1)
        for p in draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    )
    stages = tuple(
        StageCost(
            draw(st.sampled_from((1.0, 2.0))), draw(st.sampled_from((1.0, 3.0))), draw(st.integers(1, 8)),
            draw(st.integers(0, 20)), block=draw(st.integers(0, count - 1)) if count else None,
        )
        for _ in range(draw(st.integers(1, 8)))
    )  # fmt: skip
    return Profile(stages, 2, costs, turn_nbytes=draw(st.integers(0, 5)))


def least(profile: Profile, machine: Machine | None, **knobs: object) -> int:
    with pytest.raises(BudgetError) as caught:
        make_plan(profile, 1, machine, **knobs)
    assert caught.value.least_nbytes is not None
    return caught.value.least_nbytes


@settings(deadline=None, max_examples=40)
@given(profiles(blocks=False), st.integers(0, 100))
def test_without_blocks_it_is_the_fastest_candidate(profile: Profile, more: int) -> None:
    budget = Budget(least(profile, None) + more)
    plan = make_plan(profile, budget)
    for name in CANDIDATES:
        try:
            other = simulate(planners[name](profile, budget, None), profile, None, budget)
        except BudgetError:
            continue
        assert plan.seconds <= other.makespan_seconds
    assert [name for name, _, _ in plan.alternatives] == [*CANDIDATES, "least_peak"]
    assert make_plan(profile, Budget(least(profile, None) + more + 10)).seconds <= plan.seconds


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_with_blocks_it_fits_and_is_never_worse_than_a_named_planner(data: st.DataObject) -> None:
    profile, machine = data.draw(profiles()), data.draw(st.sampled_from(MACHINES))
    knobs = {
        "update": data.draw(st.sampled_from(("step", "backward", None))),
        "accumulate": data.draw(st.booleans()),
        "home": data.draw(st.sampled_from((None, DISK, DEVICE))) if machine is not MACHINES[0] else None,
    }
    bytes_needed = least(profile, machine, **knobs)
    budget = Budget(bytes_needed + data.draw(st.integers(0, 120)))
    plan = make_plan(profile, budget, machine, **knobs)
    assert simulate(plan.schedule, profile, machine, budget) == plan.simulation
    name = data.draw(st.sampled_from(CANDIDATES))
    enough = least(profile, machine, planner=name, **knobs)
    assert enough >= bytes_needed
    named = make_plan(profile, max(enough, budget.device_nbytes), machine, planner=name, **knobs)
    assert named.peak_nbytes <= max(enough, budget.device_nbytes)
    if enough <= budget.device_nbytes:
        assert plan.seconds <= named.seconds


@settings(deadline=None, max_examples=25)
@given(profiles(), st.sampled_from(("step", "backward", None)), st.sampled_from(MACHINES))
def test_everything_that_fits_stays(profile: Profile, update, machine: Machine) -> None:
    plan = make_plan(profile, 10**6, machine, update=update)
    assert plan.simulation.bytes_moved == {}
    assert plan.overhead == pytest.approx(1.0)
    at_its_peak = make_plan(profile, plan.peak_nbytes, machine, update=update)
    assert at_its_peak.simulation.bytes_moved == {}
    assert at_its_peak.seconds == plan.seconds


@pytest.mark.thinned(12)
@pytest.mark.parametrize("update", ["step", "backward", None])
@pytest.mark.parametrize("machine", MACHINES)
def test_more_budget_is_never_slower(machine: Machine, update: str | None) -> None:
    stages = tuple(StageCost(1.0 + k % 3, 2.0, 4, 10 + k % 5, block=k) for k in range(12))
    profile = Profile(stages, 4, tuple(BlockCost(10 + k % 4, 10 + k % 4, 20, 1) for k in range(12)))
    low, high = least(profile, machine, update=update), make_plan(profile, None, machine, update=update).peak_nbytes
    budgets = [low + (high - low) * i // 5 for i in range(6)]
    seconds = [make_plan(profile, budget, machine, update=update).seconds for budget in budgets]
    # The splits tried depend on the budget, so a little more of it may meet a slightly worse grid.
    assert all(later <= 1.05 * earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0]


@settings(deadline=None, max_examples=8)
@given(profiles(blocks=False), st.booleans(), st.integers(0, 60))
def test_with_a_slower_tier_everything_that_applies_is_tried(profile: Profile, equal: bool, more: int) -> None:
    machine = MACHINES[0]
    if equal:
        profile = Profile(UniformStages(profile.stages[0], 9), profile.stages[0].output_nbytes)
    budget = Budget(least(profile, machine) + more)
    plan = make_plan(profile, budget, machine)
    for name in COMPETING:
        try:
            other = simulate(planners[name](profile, budget, machine), profile, machine, budget)
        except (BudgetError, InputError):
            continue
        assert plan.seconds <= other.makespan_seconds, name
    assert {"joint", "offload", "superneurons"} <= {name for name, _, _ in plan.alternatives}


def test_what_cannot_win_is_not_tried() -> None:
    chain = Profile(tuple(StageCost(1.0 + k % 2, 1.0, 4, 40) for k in range(30)), 4)
    loop, long = Profile.uniform(40), Profile.uniform(10**6)
    near = MACHINES[0]
    assert candidates(chain) == candidates(chain, Machine()) == (*CANDIDATES, "least_peak")
    assert candidates(long) == CANDIDATES
    assert {"offload", "superneurons", "joint"} <= set(candidates(chain, near))
    assert {"double", "async_multistage"} <= set(candidates(loop, near))
    assert set(candidates(loop, near)) <= set(COMPETING), "the others are for whoever names them"
    assert not {"double", "offload", "joint"} & set(candidates(long, near))
    stages = tuple(StageCost(1.0, 1.0, 4, 40, block=0) for _ in range(30))
    assert candidates(Profile(stages, 4, (BlockCost(9),)), near) == CANDIDATES
    stored = make_plan(chain, None, near)
    assert all("not tried: a plan that neither recomputes" in text for _, _, text in stored.alternatives[1:])


def test_the_plan_says_how_far_it_is_from_the_fastest_that_can_be() -> None:
    chain = Profile(tuple(StageCost(1.0 + k % 2, 1.0, 4, 40) for k in range(30)), 4)
    text = str(make_plan(chain, 500, MACHINES[0]))
    assert "the next best, " in text
    assert "above the fastest possible" in text


@pytest.mark.parametrize(("home", "update"), [(DEVICE, "step"), (DEVICE, None), (DISK, "step")])
def test_while_gradients_gather_the_tape_may_have_what_they_do_not_take_yet(home: Tier, update: str | None) -> None:
    # Eight blocks that all stay: gradients take 128 bytes in the end, which the first of the tape may have.
    stages = tuple(StageCost(1.0, 2.0, 1, 24, block=k) for k in range(8))
    profile = Profile(stages, 1, (BlockCost(16, 16, 32),) * 8)
    limit = 8 * 48 + 128 + 40
    slow = {(DISK, DEVICE): Link(0.1), (DEVICE, DISK): Link(0.1)}
    plan = make_plan(profile, limit, Machine(slow), update=update, home=home)
    assert plan.simulation.bytes_moved == {}
    assert plan.peak_nbytes <= limit
    beside_all = make_plan(profile.without_blocks(), limit - 8 * 48 - 128)
    assert plan.simulation.forwards == 8 + 3
    assert beside_all.simulation.forwards == 8 + 7
    there = make_plan(profile, limit, update=update, home=DEVICE, accumulate=True)  # from the start
    assert there.simulation.forwards == 8 + 7


def test_named_values_stay_and_the_others_come_from_home() -> None:
    profile = Profile(
        (StageCost(1.0, 1.0, 2, 3, block=0), StageCost(1.0, 1.0, 2, 3, block=1)), 2, (BlockCost(5, 5),) * 2
    )
    kept = frozenset({Value(Kind.PARAMETERS, 0)})
    plan = make_plan(profile, None, MACHINES[0], update="step", resident=kept)
    assert (Value(Kind.PARAMETERS, 0), DEVICE) in plan.schedule.resident
    assert (Value(Kind.PARAMETERS, 1), HOST) in plan.schedule.resident


def test_the_error_says_what_works_and_what_else_would() -> None:
    profile = Profile((StageCost(1.0, 1.0, 8, 8, block=0),) * 4, 8, (BlockCost(10, 10, 20),))
    with pytest.raises(BudgetError, match=r"20 bytes.*least found to work is ") as caught:
        make_plan(profile, 20, MACHINES[0], update="backward")
    assert make_plan(profile, caught.value.least_nbytes, MACHINES[0], update="backward").seconds > 0
    with pytest.raises(BudgetError, match="home="):
        make_plan(profile, 20, update="step")
    nbytes = least(profile, MACHINES[0], update="step")
    with pytest.raises(BudgetError, match="HOST"):
        make_plan(profile, Budget(nbytes, host=3), MACHINES[0], update="step")


def test_a_long_loop_with_parameters_on_the_device_keeps_its_tree() -> None:
    profile = Profile(UniformStages(StageCost(1.0, 1.0, 4, 4, block=0), 3000), 4, (BlockCost(8, 8, 16),))
    plan = make_plan(profile, update="step")
    assert plan.overhead == pytest.approx(1.0)
    assert plan.schedule.size == 2 * 3000 + 2 + 3


def test_wrong_arguments_are_named() -> None:
    profile = Profile.uniform(4)
    with pytest.raises(InputError, match="knobs"):
        make_plan(profile, slots=2)
    with pytest.raises(InputError, match="no planner"):
        make_plan(profile, planner="rotr")
    with pytest.raises(InputError, match="update"):
        make_plan(profile, update="later")
    assert make_plan(profile, planner="periodic", segments=2).planner == "periodic"
