"""Least peak with one recompute: the published chains, brute force over all sets, a million stages."""

import random
from itertools import accumulate, combinations

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st
from least_peak import least_peak, peak

from tapestream.costs import Budget, Profile, StageCost
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Keep, Tier, distinct_nodes
from tapestream.planners import planners
from tapestream.planners._fit import device_peak
from tapestream.planners._least_peak import Sizes, freed_early, kept_to_the_end
from tapestream.planners.least_peak import _tree
from tapestream.simulate import simulate

plan = planners["least_peak"]

# chain a_0 .. a_n: bytes with everything stored, by objective A, by objective B
CHAINS = {
    (1,) * 13: (13, 6, 7),
    (8, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 1): (57, 31, 37),
    (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1, 1, 1): (96, 61, 81),
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9): (61, 25, 30),
    (64, 64, 16, 64, 64, 16, 32, 32, 8, 32, 32, 8, 4): (436, 216, 244),
}


def states_only(sizes):
    """A profile of nothing but states: no saved tensors, no cotangents."""
    stages = tuple(StageCost(1.0, 1.0, size, 0, cotangent_nbytes=0) for size in sizes[1:])
    return Profile(stages, sizes[0])


def bytes_of(sizes, checkpoints, objective):
    """The formulas of both objectives, spelled out."""
    starts, stops = [0, *checkpoints], [*checkpoints, len(sizes) - 1]
    inside = [sum(sizes[j + 1 : k + 1]) for j, k in zip(starts, stops, strict=True)]
    kept = [sum(sizes[c] for c in starts[: i + 1]) for i in range(len(starts))]
    return max(k + i for k, i in zip(kept, inside, strict=True)) if objective == "A" else kept[-1] + max(inside)


def unequal(n):
    draw = random.Random(0).randint
    return Profile(tuple(StageCost(1.0, 2.0, draw(1000, 4000), draw(4000, 20_000)) for _ in range(n)), 2000)


def every_set(n):
    return (cuts for count in range(n) for cuts in combinations(range(1, n), count))


@pytest.mark.parametrize("sizes", CHAINS)
def test_published_chains(sizes):
    stored, a, b = CHAINS[sizes]
    profile = states_only(sizes)
    assert simulate(planners["store_all"](profile), profile).peak_nbytes[Tier.DEVICE] == stored
    for knobs in ({}, {"sizes": "states"}):
        assert simulate(plan(profile, **knobs), profile).peak_nbytes[Tier.DEVICE] == a
    assert kept_to_the_end(Sizes.of_states(sizes)).nbytes == b
    checkpoints = [action.stage for action in plan(profile, objective="B") if isinstance(action, Keep)][1:]
    assert bytes_of(sizes, checkpoints, "B") >= b
    assert a <= simulate(plan(profile, objective="B"), profile).peak_nbytes[Tier.DEVICE] <= b


@pytest.mark.parametrize(("n", "nbytes"), [(16, 7), (64, 12), (100, 15), (256, 24), (1000, 46)])
def test_published_unit_chains(n, nbytes):
    profile = states_only([1] * (n + 1))
    judged = simulate(plan(profile, nbytes), profile, None, Budget(nbytes))
    assert judged.peak_nbytes[Tier.DEVICE] == nbytes
    assert judged.forwards < 2 * n


@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=2, max_size=10))
def test_both_objectives_are_least_among_all_sets(sizes):
    for objective, solve in (("A", freed_early), ("B", kept_to_the_end)):
        found = solve(Sizes.of_states(sizes))
        assert bytes_of(sizes, found.checkpoints, objective) == found.nbytes
        assert found.nbytes == min(bytes_of(sizes, cuts, objective) for cuts in every_set(len(sizes) - 1))


def tapes(most):
    """Chains that the objective "A" with "tape" counts exactly."""
    size = st.integers(0, 9)
    stage = st.builds(StageCost, st.just(1.0), st.just(1.0), size, size, cotangent_nbytes=st.none() | size,
                      gradient_nbytes=st.sampled_from((0, 0, 5)))  # fmt: skip
    stages = st.lists(stage, min_size=1, max_size=most).map(tuple)
    return st.builds(Profile, stages, size, outside_nbytes=st.just(7), turn_nbytes=st.integers(0, 20))


@settings(max_examples=300, deadline=None)
@given(profile=tapes(8))
def test_least_simulated_peak_among_all_sets(profile):
    n = len(profile)
    least = min(device_peak(_tree(n, list(cuts)), profile) for cuts in every_set(n))
    assert device_peak(plan(profile).root, profile) == least
    assert freed_early(Sizes.of_profile(profile)).nbytes + 7 == least


@settings(max_examples=300, deadline=None)
@given(profile=chains(most=9), objective=st.sampled_from("AB"), sizes=st.sampled_from(("tape", "states")))
def test_any_chain_is_valid_within_the_budget_and_runs_each_stage_at_most_twice(profile, objective, sizes):
    schedule = plan(profile, objective=objective, sizes=sizes)
    judged = simulate(schedule, profile)
    peak = judged.peak_nbytes[Tier.DEVICE]
    assert judged.forwards < 2 * len(profile)
    if peak:
        assert plan(profile, peak, objective=objective, sizes=sizes) == schedule
        assert plan(profile, peak + 1, objective=objective, sizes=sizes) == schedule
    if sizes == "tape":
        counted = (freed_early if objective == "A" else kept_to_the_end)(Sizes.of_profile(profile)).nbytes
        carried = sum(shared.nbytes for shared in profile.carried)
        assert peak <= counted + profile.outside_nbytes + carried + _forwards_only(profile)
    if peak > 1:
        with pytest.raises(BudgetError) as caught:
            plan(profile, peak - 1, objective=objective, sizes=sizes)
        assert caught.value.least_nbytes == peak


def _forwards_only(profile):
    """What a passing forward may hold that the tape does not: its input and its transient bytes."""
    return max(profile.state_nbytes(k) + cost.forward_extra_nbytes for k, cost in enumerate(profile.stages))


@settings(max_examples=100, deadline=None)
@given(profile=chains(most=12))
def test_a_never_counts_more_than_b(profile):
    sizes = Sizes.of_profile(profile)
    assert freed_early(sizes).nbytes <= kept_to_the_end(sizes).nbytes


@st.composite
def any_sizes(draw, most):
    """Not only those that a chain can have: what is reached rises and falls as it likes."""
    few = st.integers(0, draw(st.sampled_from((0, 1, 9, 99))))
    some = st.integers(0, draw(st.sampled_from((0, 1, 9, 99))))
    n = draw(st.integers(1, most))
    states, grown, beyond, last = (draw(st.lists(kind, min_size=n, max_size=n)) for kind in (few, some, some, some))
    tape = [0, *accumulate(grown)]
    reached = [here + more for here, more in zip(tape[1:], beyond, strict=True)]
    return Sizes([*states, 0], tape, reached, [tape[-1] - here + most for here, most in zip(tape, last, strict=False)])


@settings(max_examples=300, deadline=None)
@given(sizes=any_sizes(40))
def test_a_is_what_its_formula_says(sizes):
    found = freed_early(sizes)
    assert found.nbytes == least_peak(sizes) == peak(sizes, found)


def test_a_is_what_its_formula_says_on_a_longer_chain():
    for sizes in (Sizes.of_profile(unequal(400)), Sizes.of_profile(Profile.uniform(400))):
        found = freed_early(sizes)
        assert found.nbytes == least_peak(sizes) == peak(sizes, found)


def test_saved_tensors_and_cotangents_change_the_cuts():
    """Equal states, but one stage saves much: with its tape in mind it gets a segment of its own."""
    stages = tuple(StageCost(1.0, 1.0, 2, 60 if k == 5 else 4) for k in range(12))
    profile = Profile(stages, 2)
    with_tape, states = (device_peak(plan(profile, sizes=sizes).root, profile) for sizes in ("tape", "states"))
    assert with_tape < states


def test_a_million_stages():
    schedule = plan(Profile.uniform(1_000_000))
    assert sum(1 for _ in distinct_nodes(schedule.root)) < 20_000
    first = [action for _, action in zip(range(3), schedule, strict=False)]
    assert isinstance(first[2], Forward)
    assert simulate(plan(Profile.uniform(100_000)), Profile.uniform(100_000)).forwards < 200_000


def test_bad_input():
    profile = Profile.uniform(9)
    with pytest.raises(InputError, match="objective is 'A' or 'B', not 'C'"):
        plan(profile, objective="C")
    with pytest.raises(InputError, match="sizes is 'tape' or 'states', not 'all'"):
        plan(profile, sizes="all")
    with pytest.raises(InputError, match="at most 5000 stages, not 5001; use objective='A'"):
        plan(Profile.uniform(5001), objective="B")
