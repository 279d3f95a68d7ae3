"""`most_that_fit`: as many things beside a plan as its budget allows, and not much judging."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tapestream.frontends.program.fit import most_that_fit


class Thing(NamedTuple):
    stage: int
    nbytes: int


def judged(things: Sequence[Thing], room: dict[int, int], whole: int) -> int | None:
    """Bytes of them all; None where they are too many, at their stage or in all."""
    by_stage = {stage: sum(one.nbytes for one in things if one.stage == stage) for stage in room}
    total = sum(by_stage.values())
    return total if total <= whole and all(by_stage[stage] <= most for stage, most in room.items()) else None


def test_what_does_not_fit_at_one_stage_is_left_out_with_what_follows_there() -> None:
    things = [Thing(0, 4), Thing(1, 4), Thing(2, 4), Thing(1, 1), Thing(0, 4), Thing(2, 3)]
    found = most_that_fit(things, lambda some: judged(some, {0: 9, 1: 3, 2: 9}, 100))
    assert found == (15, [Thing(0, 4), Thing(2, 4), Thing(0, 4), Thing(2, 3)])


def test_none_fits() -> None:
    assert most_that_fit([Thing(0, 2), Thing(1, 2)], lambda some: judged(some, {0: 9, 1: 9}, 1)) is None
    assert most_that_fit([], lambda some: judged(some, {}, 1)) is None


@given(st.lists(st.builds(Thing, st.integers(0, 5), st.integers(1, 9)), max_size=60), st.integers(0, 300), st.data())
def test_the_first_ones_all_that_fit_and_few_are_judged(things: list[Thing], whole: int, data: st.DataObject) -> None:
    room = {stage: data.draw(st.integers(0, 60)) for stage in range(6)}
    asked = []

    def judge(some: Sequence[Thing]) -> int | None:
        asked.append(len(some))
        return judged(some, room, whole)

    found = most_that_fit(things, judge)
    first = next((n for n in range(len(things), 0, -1) if judged(things[:n], room, whole) is not None), 0)
    if first:
        assert found is not None
    if found is not None:
        total, chosen = found
        assert total == judged(chosen, room, whole)
        assert chosen[:first] == things[:first]
        left = iter(things)
        assert all(any(one is other for other in left) for one in chosen)  # in their order
    assert len(asked) <= 2 * 6 * (6 + 1)  # for each stage left out: twice as often as halving sixty takes
