"""The text form of schedules."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestream.errors import InputError
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
    distinct_nodes,
    dumps,
    loads,
)
from tapestream.ir.schedule import children_of

GOLDEN = """\
tapestream schedule 1
stages 6
planner two halves\\n\\xe9
resident PARAMETERS 0 HOST
resident OPTIMIZER_STATE 1.2 DISK
@0 = series
@1 = repeat 4 shift -1 of Backward 5
@2 = series
  Keep 0
  Forward 0 2
  Record 2
@3 = shift 3 of @2
@4 = series
  Phase FORWARD
  @2
  @3
  Offload STATE 3 DEVICE HOST
  Wait STATE 3 HOST
  Prefetch SAVED 1.1 DISK DEVICE
  Free GRADIENT 0 DEVICE
  @1
  Restore 0
  Update 1
  Update 1.2
  Update 1 HOST
  Update 1.2 HOST
@5 = series
  @4
  @0
root @5
end
"""


def golden() -> Schedule:
    half = Series((Keep(0), Forward(0, 2), Record(2)))
    whole = Series(
        (
            Phase(PhaseKind.FORWARD),
            half,
            Shift(half, 3),
            Offload(Value(Kind.STATE, 3), Tier.DEVICE, Tier.HOST),
            Wait(Value(Kind.STATE, 3), Tier.HOST),
            Prefetch(Value(Kind.SAVED, 1, 1), Tier.DISK, Tier.DEVICE),
            Free(Value(Kind.GRADIENT, 0), Tier.DEVICE),
            Repeat(Backward(5), 4, -1),
            Restore(0),
            Update(1),
            Update(1, 2),
            Update(1, 0, Tier.HOST),
            Update(1, 2, Tier.HOST),
        )
    )
    resident = ((Value(Kind.PARAMETERS, 0), Tier.HOST), (Value(Kind.OPTIMIZER_STATE, 1, 2), Tier.DISK))
    return Schedule(Series((whole, Series(()))), 6, resident, "two halves\né")


NUMBER = st.integers(-(10**12), 10**12)
VALUE = st.builds(Value, st.sampled_from(Kind), NUMBER, st.integers(0, 3))
TIER = st.sampled_from(Tier)
ACTION: st.SearchStrategy[Action] = st.one_of(
    st.builds(Forward, NUMBER, NUMBER),
    *(st.builds(kind, NUMBER) for kind in (Record, Backward, Keep, KeepInside, Restore)),
    st.builds(Update, NUMBER, st.integers(0, 3)),
    *(st.builds(kind, VALUE, TIER, TIER) for kind in (Offload, Prefetch)),
    *(st.builds(kind, VALUE, TIER) for kind in (Wait, Free)),
    st.builds(Phase, st.sampled_from(PhaseKind)),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Trees whose nodes are shared at random."""
    nodes: list[Node] = draw(st.lists(ACTION, min_size=1, max_size=4))
    for _ in range(draw(st.integers(0, 8))):
        known = st.sampled_from(nodes)
        nodes.append(
            draw(
                st.one_of(
                    st.builds(lambda inner: Series(tuple(inner)), st.lists(known, max_size=4)),
                    st.builds(Repeat, known, st.integers(0, 10**9), NUMBER),
                    st.builds(Shift, known, NUMBER),
                )
            )
        )
    resident = draw(st.lists(st.tuples(VALUE, TIER), max_size=3))
    return Schedule(nodes[-1], draw(st.integers(0, 10**12)), tuple(resident), draw(st.text(max_size=8)))


def composites(schedule: Schedule) -> int:
    return sum(isinstance(node, (Series, Repeat, Shift)) for node in distinct_nodes(schedule.root))


def test_golden() -> None:
    assert dumps(golden()) == GOLDEN
    assert loads(GOLDEN) == golden()
    assert loads(GOLDEN.replace("\n", "\r\n")) == golden()


@settings(deadline=None)
@given(schedules())
def test_loads_gives_back_what_dumps_wrote(schedule: Schedule) -> None:
    again = loads(dumps(schedule))
    assert again == schedule
    assert composites(again) == composites(schedule)
    assert dumps(again) == dumps(schedule)


@settings(deadline=None, max_examples=80)
@given(schedules(), st.data())
def test_damaged_text_is_refused_or_read_as_another_schedule_never_crashes(
    schedule: Schedule, data: st.DataObject
) -> None:
    text = dumps(schedule)
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.text(max_size=2)) + text[at + 1 :]
    found = None
    with contextlib.suppress(InputError):
        found = loads(damaged)
    if found is not None:
        assert loads(dumps(found)) == found


@settings(deadline=None)
@given(schedules(), st.data())
def test_cut_text_is_refused(schedule: Schedule, data: st.DataObject) -> None:
    text = dumps(schedule)
    with pytest.raises(InputError, match="line"):
        loads(text[: data.draw(st.integers(0, len(text) - 2))])


@pytest.mark.parametrize(
    ("old", "new", "line", "expected"),
    [
        ("schedule 1\n", "schedule 2\n", 1, "the first line"),
        ("stages 6", "stages six", 2, "a whole number"),
        ("stages 6", "stages 1_0", 2, "a whole number"),
        ("planner two", "planer two", 3, "'planner'"),
        ("halves\\n\\xe9", "halves\\xe", 3, "the planner's name"),
        ("0 HOST", "0 ROOM", 4, "a tier (DEVICE, SHARD, HOST, DISK)"),
        ("PARAMETERS 0", "WEIGHTS 0", 4, "a kind of value"),
        ("1.2 DISK", "1. DISK", 5, "a whole number"),
        ("1.2 DISK", "1.2 DISK HOST", 5, "nothing more in this line"),
        ("@0 = series", "@7 = series", 6, "'@0 = series'"),
        ("Keep 0", "Keep", 9, "a whole number"),
        ("Keep 0", "Keeps 0", 9, "an action (Forward, Record"),
        ("Forward 0 2", "Forward 0", 10, "a whole number"),
        ("shift 3 of @2", "shift 3 of @3", 12, "a node defined above"),
        ("repeat 4", "repeat -4", 7, "'@1 = series'"),
        ("Phase FORWARD", "Phase SIDEWARD", 14, "a phase (FORWARD, BACKWARD, STEP)"),
        ("Phase FORWARD", "Phase", 14, "a phase"),
        ("root @5", "root @6", 30, "a node defined above"),
        ("root @5", "@5", 30, "'@6 = series'"),
        ("root @5\nend", "root @5", 31, "'end'"),
        ("end\n", "end\nmore", 32, "nothing after 'end'"),
    ],
)
def test_damage_is_named(old: str, new: str, line: int, expected: str) -> None:
    assert old in GOLDEN
    with pytest.raises(InputError) as caught:
        loads(GOLDEN.replace(old, new, 1))
    assert f"line {line}: expected {expected}" in str(caught.value)


def test_sharing_and_depth_cost_nothing() -> None:
    node: Node = Record(0)
    for _ in range(50_000):
        node = Shift(node, 1)
    for _ in range(60):
        node = Series((node, node))
    schedule = Schedule(node, 1)
    text = dumps(schedule)
    assert len(text.splitlines()) == 50_000 + 3 * 60 + 5
    assert loads(text) == schedule
    assert loads(text).size == 2**60


def test_each_node_is_met_once_and_after_those_below() -> None:
    one, other = Record(0), Record(0)
    inner = Series((one, other, one))
    root = Series((one, Repeat(inner, 3), Shift(inner, 2), other))
    nodes = list(distinct_nodes(root))
    assert sorted(map(id, nodes)) == sorted(map(id, (one, other, inner, *root.children[1:3], root)))
    for place, node in enumerate(nodes):
        assert all(any(child is before for before in nodes[:place]) for child in children_of(node))
    assert list(distinct_nodes(one)) == [one]
    assert (Schedule(root, 9).size, Schedule(one, 1).size, Schedule(Series(()), 1).size) == (14, 1, 0)
