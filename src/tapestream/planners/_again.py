"""Other ways to recompute, where what is recorded takes room or time that copies need (`joint`)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tapestream.ir import Action, Backward, Forward, Record, Restore


def otherwise(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """The same schedule with one stretch of recomputes between two backwards made otherwise.

    Ahead: one backward earlier, while a copy in is awaited. Apart: its last stage is recorded by itself, and the others
    after the backward of that, which leaves room for a copy in at the price of further forwards.
    """
    backwards = [position for position, action in enumerate(actions) if isinstance(action, Backward)]
    for former, following in pairwise(backwards):
        if stretch := actions[former + 1 : following]:
            yield [*actions[:former], *stretch, actions[former], *actions[following:]]
        if apart := _apart(stretch, actions[following]):
            yield [*actions[: former + 1], *apart, *actions[following + 1 :]]


def _apart(stretch: Sequence[Action], backward: Action) -> list[Action]:
    """``stretch`` and ``backward``, the last stage recorded by itself; empty where it is not one run from one state."""
    recorded = [action.stage for action in stretch if isinstance(action, Record)]
    first = stretch[0] if stretch else None
    if not isinstance(first, Restore) or len(recorded) < 2:
        return []
    if recorded != list(range(first.stage, recorded[-1] + 1)):
        return []
    last = Record(recorded[-1])
    others = (action for action in stretch if action != last)
    return [first, Forward(first.stage, last.stage), last, backward, *others]
