"""Bytes of the stretches of a program, as stages."""

from itertools import pairwise

import numpy

from tapestream.executor.travel.cargo import SMALL_NBYTES
from tapestream.frontends.program.sizes import Numbers, Sizes


def stages_of(sizes: Sizes, cuts: list[int]) -> list["StageBytes"]:
    """Of each of the stretches between ``cuts``."""
    storages, operations = sizes.saves()
    borders = numpy.searchsorted(operations, cuts)
    return [
        StageBytes(sizes, a, b, storages[i:j], operations[i:j])
        for (a, b), (i, j) in zip(pairwise(cuts), pairwise(borders), strict=True)
    ]


class StageBytes:
    """Bytes of the operations a .. b-1 as one stage: ``saved`` beyond the states that backward is said to read, in so
    many ``copies`` when they move, ``tape`` with what states have of it, ``alive`` in the states before and after it,
    ``forward``, ``record`` and ``backward`` those of all that is there at the peak of each. ``reversing``: as
    ``backward``, where what the state before the stage has of ``tape`` stays until the end: others may hold it."""

    def __init__(self, sizes: Sizes, a: int, b: int, storages: Numbers, operations: Numbers) -> None:
        storages, first = numpy.unique(storages, return_index=True)
        at, nbytes = operations[first] - a, sizes.nbytes[storages]
        start, stop, written = sizes.start[storages], sizes.stop[storages], sizes.written[storages]
        before = (start <= a) & (stop >= a) & (written < a)
        after = (start <= b) & (stop >= b) & (written < b)
        in_state = before
        # Backward reads a state where that is at least half of what it has of it; else its part counts by itself.
        self.reads_input = bool(2 * nbytes[before].sum() > sizes.alive[a])
        if self.reads_input:
            after = after & ~before
        self.reads_output = bool(2 * nbytes[after].sum() > sizes.alive[b])
        counted = ~((before & self.reads_input) | (after & self.reads_output))
        inner = sizes.inner[a:b]
        self.saved, self.tape = (int(one.sum() + inner.sum()) for one in (nbytes[counted], nbytes))
        pieces = numpy.concatenate((nbytes[counted], inner[inner > 0]))
        large = int((pieces >= SMALL_NBYTES).sum())
        self.copies = large + (len(pieces) > large)
        self.copied, self.alive = sizes.copied(a), int(sizes.alive[a] + sizes.alive[b])
        # The state before the stage counts as long as the stage runs: it may be a restart checkpoint.
        entering = sizes.ending(a, b - 1)
        gone = self._since(sizes.stop[entering] - a + 1, sizes.nbytes[entering], b - a)
        self.forward = int((sizes.running[a:b] + gone).max()) + self.copied
        # Saved and not alive any more: a storage counts once while it is both.
        entering = numpy.setdiff1d(entering, storages, assume_unique=True)
        gone = self._since(sizes.stop[entering] - a + 1, sizes.nbytes[entering], b - a)
        gone += self._since(numpy.maximum(at + 1, stop - a + 1), nbytes, b - a) + numpy.cumsum(inner) - inner
        self.record = int((sizes.running[a:b] + gone).max()) + self.copied
        # What an operation has saved goes when an earlier one is reversed that has saved something too.
        savers = numpy.zeros(b - a, dtype=bool)
        savers[operations - a] = True
        savers |= inner > 0
        places = numpy.where(savers, numpy.arange(b - a), b - a - 1)
        after_it = numpy.minimum.accumulate(places[::-1])[::-1]
        made = numpy.cumsum(sizes.gradients[a:b][::-1])[::-1]  # those of leaves come while what was saved goes
        coming = sizes.reversing[a:b] + made

        def reversed_with(leaving: Numbers) -> int:
            left = numpy.zeros(b - a, dtype=numpy.int64)
            numpy.add.at(left, at[leaving], nbytes[leaving])
            return int((numpy.cumsum(left + inner)[after_it] + coming).max())

        self.backward = reversed_with(counted)
        self.reversing = reversed_with(~in_state) + int(nbytes[in_state].sum())

    @staticmethod
    def _since(places: Numbers, nbytes: Numbers, length: int) -> Numbers:
        """At each of so many places, the bytes of what counts from a place on."""
        found = numpy.zeros(length + 1, dtype=numpy.int64)
        numpy.add.at(found, numpy.clip(places, 0, length), nbytes)
        return numpy.cumsum(found)[:length]
