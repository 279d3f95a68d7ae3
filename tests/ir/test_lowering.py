"""Rows say what the schedule says, and what comes next is known in them."""

from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from chains import chains
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.costs import Budget, Link, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Node,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Repeat,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Update,
    Value,
    Wait,
    lowering,
)
from tapestream.ir.lowering import lowered
from tapestream.planners import planners

LINK = Link(0.5)
LINKS = Machine({pair: LINK for low in (Tier.HOST, Tier.DISK) for pair in ((Tier.DEVICE, low), (low, Tier.DEVICE))})
NEUTRAL = (Offload, Prefetch, Wait, Free, Update)
OF_ONE_STAGE = {
    lowering.RECORD: Record, lowering.RECORD_LAST: Record, lowering.BACKWARD: Backward, lowering.KEEP: Keep,
    lowering.RESTORE: Restore, lowering.KEEP_INSIDE: KeepInside,
}  # fmt: skip


def actions_of(schedule: Schedule) -> Iterator[tuple[Action, bool]]:
    """What the rows say, and of a Record whether its output is needed."""
    for row, offset in lowered(schedule):
        for what, place, stop, more in row:
            yield from actions_of_op(what, place + offset, stop + offset, more)


def actions_of_op(what: int, stage: int, stop: int, more: object) -> Iterator[tuple[Action, bool]]:
    state = Value(Kind.STATE, stage)
    if what in OF_ONE_STAGE:
        yield OF_ONE_STAGE[what](stage), what != lowering.RECORD_LAST
    elif what == lowering.FORWARD:
        yield Forward(stage, stop), True
    elif what == lowering.PHASE:
        assert isinstance(more, PhaseKind)
        yield Phase(more), True
    elif what in (lowering.TAKE, lowering.FREE):
        if what == lowering.TAKE:
            yield Restore(stage), True
        yield Free(state, Tier.DEVICE), True
    else:
        assert isinstance(more, tuple)
        yield copied(what, stage, more), True


def copied(what: int, stage: int, more: Sequence[object]) -> Action:
    if what == lowering.UPDATE:
        return Update(*more)  # type: ignore[arg-type]
    value, *tiers = more
    assert isinstance(value, Value)
    by_stage = what in (lowering.START, lowering.WAIT, lowering.DROP)
    assert by_stage == value.kind.by_stage
    value = value._replace(index=stage) if by_stage else value
    if what in (lowering.WAIT, lowering.WAIT_BLOCK):
        return Wait(value, *tiers)  # type: ignore[arg-type]
    if what in (lowering.DROP, lowering.DROP_BLOCK):
        return Free(value, *tiers)  # type: ignore[arg-type]
    kind = Offload if tiers[0] < tiers[1] else Prefetch  # type: ignore[operator]
    return kind(value, *tiers)  # type: ignore[arg-type]


def expected(schedule: Schedule, most: int) -> list[tuple[Action, bool]]:
    """The same by looking ahead in the list of actions."""
    actions = list(islice(schedule, most))
    found = []
    for place, action in enumerate(actions):
        following = next((a for a in actions[place + 1 :] if not isinstance(a, NEUTRAL)), None)
        last = isinstance(action, Record) and following == Backward(action.stage)
        found.append((action, not last))
    return found


def check(schedule: Schedule, most: int = 3000) -> None:
    for _ in range(2):  # rows are laid out once
        assert list(islice(actions_of(schedule), most)) == expected(schedule, most + 400)[:most]


NUMBER = st.integers(-3, 3)
VALUE = st.builds(Value, st.sampled_from(Kind), NUMBER, st.integers(0, 1))
TIER = st.sampled_from(Tier)
COPY = st.tuples(VALUE, st.sampled_from([(a, b) for a in Tier for b in Tier if a != b])).map(
    lambda one: (Offload if one[1][0] < one[1][1] else Prefetch)(one[0], *one[1])
)
ACTION: st.SearchStrategy[Action] = st.one_of(
    st.builds(Forward, NUMBER, NUMBER),
    *(st.builds(kind, NUMBER) for kind in (Record, Record, Backward, Backward, Keep, KeepInside, Restore)),
    st.builds(Update, NUMBER, st.integers(0, 3), TIER),
    COPY,
    *(st.builds(kind, VALUE, TIER) for kind in (Wait, Free)),
    st.builds(Free, st.builds(Value, st.just(Kind.STATE), NUMBER), st.just(Tier.DEVICE)),
    st.builds(Phase, st.sampled_from(PhaseKind)),
)


@st.composite
def trees(draw: st.DrawFn) -> Node:
    """Trees whose nodes are shared at random."""
    nodes: list[Node] = draw(st.lists(ACTION, min_size=1, max_size=6))
    for _ in range(draw(st.integers(0, 9))):
        known = st.sampled_from(nodes)
        count = st.one_of(st.integers(0, 4), st.sampled_from((96, 97, 200, 10**7)))
        series = st.builds(lambda inner: Series(tuple(inner)), st.lists(known, max_size=5))
        nodes.append(draw(st.one_of(series, st.builds(Repeat, known, count, NUMBER), st.builds(Shift, known, NUMBER))))
    return nodes[-1]


@settings(deadline=None, max_examples=300)
@given(trees())
def test_rows_of_any_tree_say_what_it_says(root: Node) -> None:
    check(Schedule(root, 4))


@pytest.mark.parametrize("name", [name for name in planners if name != "join"])
@settings(max_examples=12, deadline=None)
@given(profile=chains(most=9), share=st.floats(0.1, 1.1), times=st.sampled_from((1, 30)))
def test_rows_of_every_planner_say_what_it_says(name: str, profile: Profile, share: float, times: int) -> None:
    stages = tuple(profile.stages) * times if name in ("store_all", "periodic") else profile.stages
    profile = Profile(stages, profile.initial_nbytes)
    budget = Budget(max(1, round(share * 60)), host=30, disk=None)
    try:
        check(planners[name](profile, budget, LINKS))
    except BudgetError as error:
        if error.least_nbytes is not None:
            check(planners[name](profile, Budget(error.least_nbytes, host=30, disk=None), LINKS))
    except InputError:
        pass  # this planner wants equal stages


@pytest.mark.parametrize("n", [1, 2, 95, 97, 1000, 30_000])
def test_rows_of_flat_schedules_of_any_length(n: int) -> None:
    records = [Record(k) for k in range(n)]
    backs = [Backward(k) for k in reversed(range(n))]
    check(Schedule.of([Phase(PhaseKind.FORWARD), *records, Phase(PhaseKind.BACKWARD), *backs], n), 5000)
    pairs = [one for k in reversed(range(n)) for one in (Keep(k), Record(k), Free(Value(Kind.SAVED, k), Tier.HOST))]
    mixed = [other for k, one in enumerate(pairs) for other in (one, *([Backward(n - 1 - k // 3)] * (k % 3 == 2)))]
    check(Schedule.of(mixed, n), 5000)


def test_a_long_loop_takes_few_rows() -> None:
    schedule = planners["revolve"](Profile.uniform(10**6), None, None, slots=40)
    pieces = sum(1 for _ in islice(lowered(schedule), 10**5))
    assert pieces == 10**5
    actions = sum(len(row) for row, _ in islice(lowered(schedule), 1000))
    assert actions > 10_000


def test_a_record_waits_for_what_comes_rows_later() -> None:
    copies = Repeat(Free(Value(Kind.STATE, 0), Tier.HOST), 500)
    for stage, needed in ((1, False), (0, True)):
        parted = Schedule(Series((Series((Keep(1), Record(1))), copies, copies, Backward(stage), Record(2))), 3)
        check(parted)
        assert dict(actions_of(parted))[Record(1)] is needed
        assert dict(actions_of(parted))[Record(2)]
