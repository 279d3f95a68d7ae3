"""As many things beside a plan as its budget allows."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Thing = TypeVar("Thing")
Judged = TypeVar("Judged")


def most_that_fit(
    things: Sequence[Thing], judge: Callable[[Sequence[Thing]], Judged | None]
) -> tuple[Judged, int] | None:
    """What ``judge`` makes of the first so many ``things``, as many as it takes without answering None, and how many
    these are; None for none. More of them never take less memory."""
    found, least, most = None, 0, len(things)
    while least < most:
        count = (least + most + 1) // 2
        one = judge(things[:count])
        if one is None:
            most = count - 1
        else:
            found, least = (one, count), count
    return found
