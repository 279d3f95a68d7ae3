"""The judge of trees agrees with the flat one, on valid and invalid trees, and judges huge ones."""

import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Budget, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError, ScheduleError
from tapestream.ir import (
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Phase,
    PhaseKind,
    Record,
    Repeat,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Value,
    series,
)
from tapestream.simulate import Simulation, compose, run, simulate

FORWARD, BACKWARD, STEP = (Phase(kind) for kind in PhaseKind)


def free(k: int) -> Free:
    return Free(Value(Kind.STATE, k), Tier.DEVICE)


def store_all(n: int) -> Schedule:
    return Schedule(series(FORWARD, Repeat(Record(0), n, 1), BACKWARD, Repeat(Backward(n - 1), n, -1)), n)


def segments(count: int, length: int, last_free: bool = True) -> Schedule:
    """Keep every ``length``-th state, then recompute and reverse one segment after the other."""
    n = count * length
    back = series(
        Restore(0), Repeat(Record(0), length, 1), Repeat(Backward(length - 1), length, -1), *([free(0)] * last_free)
    )
    ahead = Repeat(series(Keep(0), Forward(0, length)), count, length)
    return Schedule(series(FORWARD, ahead, BACKWARD, Repeat(Shift(back, n - length), count, -length), STEP), n)


def bisected(n: int) -> Schedule:
    """Keep the middle, reverse the right half, then the left one; the halves share their nodes. n: a power of two."""
    node: Node = series(Record(0), Backward(0))
    size = 1
    while size < n:
        right = Shift(node, size)
        node = series(Keep(0), Forward(0, size), right, Restore(0), free(0), node)
        size *= 2
    return Schedule(series(FORWARD, Keep(0), Forward(0, n), BACKWARD, Restore(0), free(0), node), n)


def uniform(n: int, **costs: object) -> Profile:
    numbers = {"forward_seconds": 1, "backward_seconds": 2, "output_nbytes": 10, "saved_nbytes": 100, **costs}
    cost = StageCost(**numbers)  # type: ignore[arg-type]
    return Profile(UniformStages(cost, n), cost.output_nbytes, outside_nbytes=5, turn_nbytes=3, turn_seconds=4)


def both(schedule: Schedule, profile: Profile) -> list[Simulation | tuple[int | None, str]]:
    """What each judge finds: a Simulation, or where a rule is broken."""
    found: list[Simulation | tuple[int | None, str]] = []
    for composes in (False, True):
        # The second judge must find errors by itself, not by asking the first one.
        with (
            mock.patch.object(run, "composable", lambda *_, c=composes: c),
            mock.patch.object(run, "_LONGEST_RERUN", 0),
        ):
            try:
                found.append(simulate(schedule, profile))
            except ScheduleError as error:
                found.append((error.position, str(error).splitlines()[1]))
    return found


COSTS = st.fixed_dictionaries(
    {
        "output_nbytes": st.integers(0, 20),
        "saved_nbytes": st.integers(0, 40),
        "forward_extra_nbytes": st.integers(0, 30),
        "backward_extra_nbytes": st.integers(0, 30),
        "record_seconds": st.sampled_from([None, 3]),
        "gradient_nbytes": st.sampled_from([0, 6]),
        "reads_input": st.booleans(),
        "reads_output": st.booleans(),
    }
)
STAGE = st.integers(0, 4)
ACTION = st.one_of(
    st.builds(lambda k, length: Forward(k, k + length), STAGE, st.integers(1, 3)),
    *(st.builds(kind, STAGE) for kind in (Record, Backward, Keep, Restore, free)),
)
NODE = st.recursive(
    ACTION,
    lambda inner: st.one_of(
        st.builds(lambda nodes: Series(tuple(nodes)), st.lists(inner, min_size=1, max_size=4)),
        st.builds(Repeat, inner, st.integers(0, 5), st.integers(-2, 2)),
        st.builds(Shift, inner, st.integers(-2, 2)),
    ),
    max_leaves=8,
)


def runs(draw: st.DrawFn, live: int, n: int, kept: set[int], recorded: set[int]) -> list[Node]:
    """Random actions that are valid for a chain at ``live``, ending at its end."""
    nodes: list[Node] = []
    while live < n:
        if live not in kept and draw(st.booleans()):
            nodes.append(Keep(live))
            kept.add(live)
        if live in recorded or draw(st.booleans()):
            stop = draw(st.integers(live + 1, n))
            nodes.append(Forward(live, stop))
            live = stop
        else:
            length = 1
            while live + length < n and live + length not in recorded and draw(st.booleans()):
                length += 1
            nodes.append(Repeat(Record(live), length, 1))
            recorded |= set(range(live, live + length))
            live += length
        if kept and draw(st.integers(0, 3)) == 3:
            live = draw(st.sampled_from(sorted(kept)))
            nodes.append(Restore(live))
    return nodes


@st.composite
def valid(draw: st.DrawFn) -> Schedule:
    """A valid schedule: random forward sweeps, then backward with whatever recompute is needed."""
    n = draw(st.integers(1, 9))
    kept, recorded = {0}, set[int]()
    nodes: list[Node] = [FORWARD, Keep(0), *runs(draw, 0, n, kept, recorded), BACKWARD]
    for k in reversed(range(n)):
        if k not in recorded:
            start = max(j for j in kept if j <= k)
            nodes += [Restore(start), *([Forward(start, k)] if start < k else []), Record(k)]
            recorded.add(k)
        nodes.append(Backward(k))
        if k in kept and k and draw(st.booleans()):
            kept.remove(k)
            nodes.append(free(k))
    nodes += [free(k) for k in sorted(kept)]
    if draw(st.booleans()):
        nodes.append(STEP)
    return Schedule(Series(tuple(nodes)), n)


@settings(max_examples=150, deadline=None)
@given(schedule=valid(), costs=COSTS, smallest=st.sampled_from([1, 3, 12]))
def test_agrees_on_valid_schedules(schedule: Schedule, costs: dict[str, object], smallest: int) -> None:
    with mock.patch.object(compose, "_SMALLEST", smallest):
        flat, tree = both(schedule, uniform(schedule.stages, **costs))
    assert isinstance(flat, Simulation)
    assert flat == tree


@settings(max_examples=300, deadline=None)
@given(nodes=st.lists(NODE, max_size=5), costs=COSTS, valid_start=valid(), smallest=st.sampled_from([1, 12]))
def test_agrees_on_broken_trees(
    nodes: list[Node], costs: dict[str, object], valid_start: Schedule, smallest: int
) -> None:
    assert isinstance(valid_start.root, Series)
    for head in ((FORWARD,), valid_start.root.children[:-1]):
        schedule = Schedule(Series((*head, *nodes)), valid_start.stages)
        with mock.patch.object(compose, "_SMALLEST", smallest):
            flat, tree = both(schedule, uniform(schedule.stages, **costs))
        assert flat == tree


@pytest.mark.parametrize("schedule", [store_all(50), segments(7, 5), segments(1, 9), bisected(64)])
@pytest.mark.parametrize("reads", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("smallest", [1, 12])
def test_agrees_on_shared_trees(schedule: Schedule, reads: tuple[bool, bool], smallest: int) -> None:
    profile = uniform(schedule.stages, reads_input=reads[0], reads_output=reads[1], forward_extra_nbytes=13)
    with mock.patch.object(compose, "_SMALLEST", smallest):
        flat, tree = both(schedule, profile)
    assert isinstance(flat, Simulation)
    assert flat == tree


def test_ten_million_steps_stored() -> None:
    n = 10_000_000
    began = time.perf_counter()
    found = simulate(store_all(n), uniform(n))
    assert time.perf_counter() - began < 1
    assert found.peak_nbytes[Tier.DEVICE] == 5 + 110 * n + 10 + 10 + 3
    assert found.peak_position[Tier.DEVICE] == n + 1
    assert found.makespan_seconds == 3 * n + 4
    assert (found.forwards, found.recorded, found.backwards) == (n, n, n)
    with pytest.raises(InputError, match="timeline of 20000002 actions is too long"):
        _ = found.timeline


def test_bisection_of_a_quarter_million_steps() -> None:
    n = 2**18
    began = time.perf_counter()
    found = simulate(bisected(n), uniform(n))
    assert time.perf_counter() - began < 1
    # The table of ALGORITHMS for bisection, T(n) = n/2 + 2 T(n/2), with the first forward sweep added.
    assert found.forwards == n + n + n * 18 // 2
    # One state at each level, the initial one among them, two around the last stage and its saved tensors.
    assert found.peak_nbytes[Tier.DEVICE] == 5 + 10 * 18 + 10 + 10 + 10 + 100


def test_segments_grow_as_the_square_root() -> None:
    found = simulate(segments(1000, 1000), uniform(10**6))
    # All 1000 kept, the states inside one segment, its saved tensors, two cotangents.
    assert found.forwards == 2 * 10**6
    assert found.peak_nbytes[Tier.DEVICE] == 5 + 10 * 1000 + 10 * 999 + 100 * 1000 + 10 + 10


def test_error_deep_inside_a_huge_tree() -> None:
    n = 10**6
    with pytest.raises(ScheduleError) as caught:
        simulate(segments(1000, 1000, last_free=False), uniform(n))
    total = segments(1000, 1000, last_free=False).size
    assert caught.value.position == total
    broken = Schedule(series(FORWARD, Repeat(Record(0), n + 5, 1)), n)
    with pytest.raises(ScheduleError, match=rf"> {n + 1}: Record\({n}\)"):
        simulate(broken, uniform(n))


def test_error_in_a_small_tree_has_the_reason_in_full() -> None:
    with pytest.raises(ScheduleError, match=r"there is no stage 20, there are 20 numbered from 0"):
        simulate(Schedule(series(FORWARD, Repeat(Record(0), 200, 1)), 20), uniform(20))


def test_budget_of_a_huge_tree() -> None:
    with pytest.raises(BudgetError, match=r"action 1000001, Phase\(BACKWARD\)") as caught:
        simulate(store_all(10**6), uniform(10**6), budget=Budget("1MiB"))
    assert caught.value.least_nbytes == 5 + 110 * 10**6 + 23
