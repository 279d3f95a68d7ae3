"""Segments whose first state is in a slower tier, from which it may be read several times."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapestream.ir import Forward, Node, Series, Shift
from tapestream.planners._recurrences import least_forwards_to
from tapestream.planners._segments import Segments
from tapestream.planners._tiers import Store


@dataclass(frozen=True, slots=True)
class Reread:
    """Segments from a first state that is in a slower tier, and may be read several times.

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
        here = table(segments, longest)
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
    seconds, cuts = table(segments, n), np.zeros(n, np.int64)
    first = store.write_seconds + segments.forward * np.arange(1, n + 1) + store.read_seconds + reread.table
    for m in range(2, n + 1):
        split = first[: m - 1] + seconds[m - 2 :: -1]
        best = int(split.argmin())
        if split[best] < seconds[m - 1]:
            seconds[m - 1], cuts[m - 1] = split[best], best + 1
    return cuts


def table(segments: Segments, longest: int) -> NDArray[np.float64]:
    """`Segments.seconds` of 1 .. ``longest`` stages, in this order."""
    lengths, each = np.arange(1, longest + 1), segments.cost.recorded_seconds + segments.cost.backward_seconds
    return lengths * each + least_forwards_to(longest, segments.slots) * segments.forward
