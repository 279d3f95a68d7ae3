"""Segments reversed by binomial checkpointing on the device, their first state on the device or in a slower tier."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import StageCost
from tapestream.ir import Forward, Node, Series, Shift
from tapestream.planners._recurrences import (
    Part,
    Twins,
    binomial_cut,
    least_forwards,
    least_forwards_to,
    reversal,
    sweep_and_back,
)
from tapestream.planners._tiers import Store


@dataclass(frozen=True, slots=True)
class Segments:
    """Binomial checkpointing with ``slots`` restart checkpoints on equal stages of ``cost``."""

    cost: StageCost
    slots: int
    parts: dict[Part, Twins] = field(default_factory=dict)

    @property
    def forward(self) -> float:
        """Seconds of one forward."""
        return self.cost.forward_seconds

    def seconds(self, length: int) -> float:
        """Seconds of recording and reversing ``length`` stages, their first state being live."""
        each = self.cost.recorded_seconds + self.cost.backward_seconds
        return length * each + least_forwards(length, self.slots) * self.forward

    def table(self, longest: int) -> NDArray[np.float64]:
        """`seconds` of 1 .. ``longest`` stages, in this order."""
        lengths, each = np.arange(1, longest + 1), self.cost.recorded_seconds + self.cost.backward_seconds
        return lengths * each + least_forwards_to(longest, self.slots) * self.forward

    def live(self, length: int) -> Node:
        """The actions of `seconds`."""
        return reversal(Part(length, self.slots), binomial_cut, self.parts).live

    def last(self, length: int) -> tuple[Node, ...]:
        """The same for the last stages of the chain, through the turn."""
        return sweep_and_back(Part(length, self.slots), binomial_cut, self.parts)

    def kept(self, length: int) -> Node:
        """As `live`, the first state being kept already; it is freed."""
        return reversal(Part(length, self.slots), binomial_cut, self.parts).kept


@dataclass(frozen=True, slots=True)
class Reread:
    """The same from a first state that is in a slower tier, and may be read several times.

    one(m) = min(z(m), min_j j f + z(m-j) + r + one(j)) for m stages, z being the seconds on the device and r those of
    a read, the first read not counted (Aupy, Herrmann, Hovland, Robert 2016). ``table[m-1]`` and ``cuts[m-1]``, the j
    (0: z); beyond the tables, which take O(m^2), z.
    """

    segments: Segments
    store: Store
    table: NDArray[np.float64]
    cuts: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Segments, store: Store, longest: int) -> "Reread":
        """With tables up to ``longest`` stages."""
        here = segments.table(longest)
        seconds, cuts = here.copy(), np.zeros(longest, np.int64)
        ahead = segments.forward * np.arange(longest + 1)
        for m in range(2, longest + 1):
            split = ahead[1:m] + here[m - 2 :: -1] + store.read_seconds + seconds[: m - 1]
            best = int(split.argmin())
            if split[best] < here[m - 1]:
                seconds[m - 1], cuts[m - 1] = split[best], best + 1
        return cls(segments, store, seconds, cuts)

    def seconds(self, length: int) -> float:
        """one(length)."""
        return float(self.table[length - 1]) if length <= len(self.table) else self.segments.seconds(length)

    def reversed(self, length: int) -> Node:
        """Read the first state, reverse the segment, drop the state from the tier."""
        out: list[Node] = []
        while length <= len(self.cuts) and (cut := int(self.cuts[length - 1])):
            out += (*self.store.read(0, last=False), Forward(0, cut), Shift(self.segments.live(length - cut), cut))
            length = cut
        return Series((*out, *self.store.read(0, last=True), self.segments.live(length)))


def swept_lengths(n: int, reread: Reread) -> list[int]:
    """Segments of the fastest first sweep, the slower tier having no limit; all but the last start with a write.

    Aupy, Herrmann, Hovland, Robert 2016; O(n^2), and ``reread`` needs tables up to ``n``.
    """
    cuts = _cuts(n, reread)
    lengths: list[int] = []
    while cut := int(cuts[n - 1]):
        lengths.append(cut)
        n -= cut
    return [*lengths, n]


def _cuts(n: int, reread: Reread) -> NDArray[np.int64]:
    """The length of the first segment of m stages, at m - 1; 0 where nothing is written."""
    segments, store = reread.segments, reread.store
    seconds, cuts = segments.table(n), np.zeros(n, np.int64)
    first = store.write_seconds + segments.forward * np.arange(1, n + 1) + store.read_seconds + reread.table
    for m in range(2, n + 1):
        split = first[: m - 1] + seconds[m - 2 :: -1]
        best = int(split.argmin())
        if split[best] < seconds[m - 1]:
            seconds[m - 1], cuts[m - 1] = split[best], best + 1
    return cuts
