"""Which of the last stages a schedule records, and differentiates, one right after the other: one graph will do."""

import itertools
from collections.abc import Container, Sequence

from tapestream.ir.actions import Backward, Record
from tapestream.ir.schedule import Schedule
from tapestream.runner.stage import Traits


def tail_of(schedule: Schedule, once: Container[int], traits: Sequence[Traits]) -> int:
    """The first of the last stages that may be recorded as one graph; the number of stages where the last may not.

    Nothing happens between their records nor between their backwards, so the bytes are the same at every moment: a
    graph frees what it saved as it is differentiated, and the cotangent that it holds meanwhile is the caller's own.
    Each runs once (``once``). A stage that writes into its input gets a copy of it, which ends the graph before it.
    """
    n = len(traits)
    if n - 1 not in once:
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
    while first in recorded and first in differentiated and first - 1 in once and not traits[first].mutates:
        first -= 1
    return first
