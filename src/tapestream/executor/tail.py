"""Which of the last stages a schedule records, and differentiates, one right after the other: one graph will do."""

import itertools
from collections.abc import Container, Sequence

from tapestream.ir.actions import Backward, Record
from tapestream.ir.schedule import Schedule
from tapestream.runner.stage import Traits


def tail_of(
    schedule: Schedule, once: Container[int], traits: Sequence[Traits], moving: Container[int] = frozenset()
) -> int:
    """The first of the last stages that may be recorded as one graph; the number of stages where the last may not.

    Nothing happens between their records nor between their backwards, so the bytes are the same at every moment: a
    graph frees what it saved as it is differentiated, and the cotangent that it holds meanwhile is the caller's own.
    Each runs once (``once``), and its saved tensors stay where they are (those of ``moving`` do not). A stage that
    writes into its input gets a copy of it, which ends the graph before it.
    """
    n = len(traits)
    if n - 1 not in once or n - 1 in moving:
        return n
    recorded, differentiated = set(), set()
    for before, after in itertools.pairwise(schedule):
        match before, after:
            case Record(a), Record(b) if b == a + 1:
                recorded.add(b)
            case Backward(b), Backward(a) if b == a + 1:
                differentiated.add(b)
            case _:
                pass
    first = n - 1
    alone = [k in moving or k not in once for k in range(n)]
    while first in recorded and first in differentiated and not alone[first - 1] and not traits[first].mutates:
        first -= 1
    return first
