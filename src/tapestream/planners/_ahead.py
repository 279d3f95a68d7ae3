"""Recomputing ahead: while a copy in is awaited, the device can recompute what a later backward needs (`joint`)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tapestream.ir import Action, Backward


def ahead(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """The same computation with one stretch of recomputes made one backward earlier, a stretch at a time."""
    backwards = [position for position, action in enumerate(actions) if isinstance(action, Backward)]
    for former, following in pairwise(backwards):
        if stretch := actions[former + 1 : following]:
            yield [*actions[:former], *stretch, actions[former], *actions[following:]]
