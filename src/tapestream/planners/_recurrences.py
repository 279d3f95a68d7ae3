"""Binomial numbers of checkpointing and the tree of a divide-and-conquer schedule, shared by several planners."""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    Series,
    Shift,
    Tier,
    Value,
)


@lru_cache(maxsize=1 << 16)
def reach(slots: int, repetitions: int) -> int:
    """beta(s, t) = C(s + t, s): the longest chain that ``slots`` restart checkpoints reverse when no stage is advanced
    more than ``repetitions`` times (Griewank & Walther 2000); 0 for negative repetitions."""
    return comb(slots + repetitions, slots) if repetitions >= 0 else 0


@lru_cache(maxsize=1 << 16)
def repetitions(n: int, slots: int) -> int:
    """The least t with beta(slots, t) >= n; ``slots`` is at least 1."""
    high = 1
    while reach(slots, high) < n:
        high *= 2
    low = -1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reach(slots, middle) >= n else (middle, high)
    return high


def least_forwards(n: int, slots: int) -> int:
    """P(n, s) = t n - beta(s + 1, t - 1): the fewest forward steps that save nothing, each stage being recorded once
    besides (Griewank & Walther 2000, Theorem 6.1). ``slots`` counts the slot of the initial state."""
    t = repetitions(n, slots)
    return t * n - reach(slots + 1, t - 1)


def least_forwards_to(longest: int, slots: int) -> NDArray[np.int64]:
    """`least_forwards` of 1 .. ``longest`` stages, in this order."""
    most = repetitions(longest, slots)
    n = np.arange(1, longest + 1)
    t: NDArray[np.int64] = np.array([reach(slots, i) for i in range(most)], np.int64).searchsorted(n)
    less = np.array([reach(slots + 1, i - 1) for i in range(most + 1)], np.int64)
    return n * t - less[t]


def binomial_cut(part: "Part") -> "tuple[Part, Part] | None":
    """The longest left part among the optimal ones: then one of both parts is as long as its slots and repetitions
    reach, and such parts recur."""
    n, slots = part.length, part.slots
    if n == 1:
        return None
    t = repetitions(n, slots)
    left = min(reach(slots, t - 1), n - reach(slots - 1, t - 1))
    return Part(left, slots), Part(n - left, slots - 1)


def recorded(start: int, stop: int) -> Node:
    """Record stages start .. stop-1."""
    return Record(start) if stop == start + 1 else Repeat(Record(start), stop - start, 1)


def reversed_stages(start: int, stop: int) -> Node:
    """Backward of stages stop-1 .. start."""
    return Backward(stop - 1) if stop == start + 1 else Repeat(Backward(stop - 1), stop - start, -1)


def freed(stage: int) -> Free:
    """End the hold on restart checkpoint ``stage``."""
    return Free(Value(Kind.STATE, stage), Tier.DEVICE)


def turn(start: int, stop: int) -> Iterator[Node]:
    """The last stages of the first sweep: record them, hand over, run their backward."""
    yield recorded(start, stop)
    yield Phase(PhaseKind.BACKWARD)
    yield reversed_stages(start, stop)


class Part(NamedTuple):
    """A piece of the chain: its length, and the restart checkpoints that it may use where the planner counts them."""

    length: int
    slots: int = 0


Split = Callable[[Part], "tuple[Part, Part] | None"]
"""Cuts a part into (left, right), or None where all of it is to be recorded."""


def divide(n: int, slots: int, split: Split) -> Node:
    """The whole schedule of a divide-and-conquer planner over ``n`` stages.

    Each part that is cut keeps its first state, runs forward to the cut, treats the right part, restores and treats
    the left one. Equal parts share one node, so the tree has as many nodes as there are distinct parts.
    """
    return Series((Phase(PhaseKind.FORWARD), *sweep_and_back(Part(n, slots), split, {})))


def sweep_and_back(part: Part, split: Split, parts: "dict[Part, Twins]") -> tuple[Node, ...]:
    """The last stages of a chain, from their first state, which is live, through the turn to their first backward."""
    sweep: list[Node] = []
    lefts: list[Node] = []
    offset, n = 0, part.length
    while (cut := split(part)) is not None:
        left, right = cut
        sweep += (Keep(offset), Forward(offset, offset + left.length))
        lefts += (Shift(reversal(left, split, parts).kept, offset), Restore(offset))
        offset, part = offset + left.length, right
    return (*sweep, *turn(offset, n), *reversed(lefts))


class Twins(NamedTuple):
    """One part twice, its first state being live: as it is, and kept already (then the part frees it)."""

    live: Node
    kept: Node


def reversal(root: Part, split: Split, parts: dict[Part, Twins]) -> Twins:
    """The nodes that record and reverse a part, its first stage being number 0, without recursion.

    ``parts`` collects them, and on the way those of all parts below.
    """
    stack = [root]
    while stack:
        part = stack.pop()
        cut = split(part)
        if cut is None:
            leaf = recorded(0, part.length), reversed_stages(0, part.length)
            parts[part] = Twins(Series(leaf), Series((freed(0), *leaf)))
        elif missing := [child for child in cut if child not in parts]:
            stack += (part, *missing)
        else:
            left, right = (parts[child] for child in cut)
            middle = cut[0].length
            kept = Series((Forward(0, middle), Shift(right.live, middle), Restore(0), left.kept))
            parts[part] = Twins(Series((Keep(0), kept)), kept)
    return parts[root]


def counts(n: int, limit: int = 32) -> Iterable[int]:
    """Numbers of slots or segments worth trying on ``n`` stages: all up to ``limit``, then an eighth more each time.

    ``n`` itself comes last. The list does not depend on the budget, so that more budget cannot lose a candidate.
    """
    value = 1
    while value < n:
        yield value
        value += 1 if value < limit else value // 8
    yield n
