"""Every model of the zoo, every planner, every level of budget: losses, gradients, parameters, buffers, generators,
bit for bit."""

import itertools

import pytest
import torch
from exact import LEVELS, PLANNERS, assert_exact
from models import CASES

RECOMPUTING = [p for p in PLANNERS if p != "store_all"]
# Every model meets each recomputing planner or each level at least once, and all pairs of planner and level occur.
PAIRWISE = [
    (name, RECOMPUTING[(i + j) % len(RECOMPUTING)], LEVELS[1 + (i + j) % 3])
    for i, name in enumerate(CASES)
    for j in range(3)
]


@pytest.mark.parametrize("name", CASES)
def test_stored(name: str) -> None:
    net = assert_exact(CASES[name], "store_all", "full")
    assert net.plan is not None
    assert net.plan.simulation.forwards == len(net.plan.profile)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("name", "planner", "level"), PAIRWISE)
def test_recomputed(name: str, planner: str, level: str) -> None:
    assert_exact(CASES[name], planner, level)


@pytest.mark.full
@pytest.mark.parametrize(("name", "planner", "level"), list(itertools.product(CASES, PLANNERS, LEVELS)))
def test_full_product(name: str, planner: str, level: str) -> None:
    assert_exact(CASES[name], planner, level)


@pytest.mark.parametrize("name", ["gpt", "resnet", "tied_autocast", "adapter"])
def test_three_micro_batches(name: str) -> None:
    assert_exact(CASES[name], "rotor", "half", micro_batches=3)


def test_budgets_below_full_recompute() -> None:
    """The tests above would prove nothing if every plan stored everything."""
    for name in ("gpt", "resnet", "lstm", "unet", "noisy", "checkpointed", "tied_autocast"):
        plan = assert_exact(CASES[name], "rotor", "least").plan
        assert plan is not None
        assert plan.simulation.forwards > len(plan.profile), name


@pytest.mark.parametrize("name", ["gpt", "resnet", "normed", "unet"])
def test_no_dependence_on_the_number_of_threads(name: str) -> None:
    torch.set_num_threads(2)
    assert_exact(CASES[name], "rotor", "least")
