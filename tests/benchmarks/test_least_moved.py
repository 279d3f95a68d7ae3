"""The lower bound on bytes moved: no plan is below it, and small cases that can be done by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.least_moved import least_moved, least_with_any_tape, maximum
from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.ir import Tier
from tapestream.planning.auto import make_plan

DISK = Machine({(Tier.DISK, Tier.DEVICE): Link(8.0), (Tier.DEVICE, Tier.DISK): Link(8.0)})


def chain(blocks: int, tape: int = 0, parts: int = 1) -> Profile:
    state = 20 << 20
    cost = BlockCost(10 << 20, 10 << 20, state, state_parts=(state // parts,) * parts)
    return Profile(tuple(StageCost(1.0, 2.0, 1, tape, block=k) for k in range(blocks)), 1, (cost,) * blocks)


@settings(deadline=None, max_examples=12)
@given(st.integers(2, 6), st.integers(0, 200), st.integers(0, 8 << 20), st.sampled_from(("step", "backward")))
def test_no_plan_is_below_it(blocks: int, more: int, tape: int, update: str) -> None:
    plan = make_plan(chain(blocks, tape), Budget((60 + more) << 20), DISK, update=update, home=Tier.DISK)
    moved = sum(plan.simulation.bytes_moved.values())
    assert least_moved(plan) <= moved
    assert least_with_any_tape(plan, update) <= moved


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("room", [60, 90, 120])
def test_state_in_parts_is_written_too(update: str, room: int) -> None:
    """So the bound for this tape is not below the one for all tapes."""
    plan = make_plan(chain(4, parts=4), Budget(room << 20), DISK, update=update, home=Tier.DISK)
    moved = sum(plan.simulation.bytes_moved.values())
    assert least_with_any_tape(plan, update) <= least_moved(plan) <= moved


def test_with_room_for_one_update_alone_everything_moves() -> None:
    """Two blocks of 10 MiB, 20 of state: block 1 serves forward and backward at the turn, block 0 waits for the next
    forward; every other use reads, and all is written."""
    plan = make_plan(chain(2), Budget((40 << 20) + 8), DISK, update="backward", home=Tier.DISK)
    exact = (2 * 20 + 2 * 30 + 20) << 20
    assert least_moved(plan) == pytest.approx(exact, abs=64)
    assert sum(plan.simulation.bytes_moved.values()) == exact


def test_what_fits_need_not_move() -> None:
    plan = make_plan(chain(3), Budget(1 << 30), DISK, update="step", home=Tier.DISK)
    assert least_moved(plan) == 0 == sum(plan.simulation.bytes_moved.values())


def test_the_simplex_method_finds_known_optima() -> None:
    found = maximum(np.array([3.0, 5.0]), np.array([[1, 0], [0, 2], [3, 2]], float), np.array([4.0, 12.0, 18.0]))
    assert found == pytest.approx(36)  # x = (2, 6)
    beale = np.array([[0.25, -60, -0.04, 9], [0.5, -90, -0.02, 3], [0, 0, 1, 0]])  # cycles without Bland's rule
    assert maximum(np.array([0.75, -150, 0.02, -6]), beale, np.array([0.0, 0.0, 1.0])) == pytest.approx(0.05)
