"""Bytes of a recorded program, operation by operation: what is alive, made, saved and given back as gradients."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

from tapestream.executor.program.record import ALIVE, Record

Numbers = NDArray[Any]


class Sizes:
    """Storages of arguments, captured tensors and results are others' and count nothing, except that what the program
    writes into of captured ones is part of every state from the beginning to its last use.

    ``alive``: at border k (before operation k, border n last) what later operations need, each storage once.
    ``held``: the same, with what the program itself still holds.
    ``running``: while operation k runs, with what it makes: the larger of what replays and the program itself hold.
    ``cotangent``: at border k those of the values alive there. ``reversing``: while operation k is reversed, all
    cotangents that there are. ``start``, ``stop``: by storage, the borders between which it is alive. ``written``: by
    storage, the last operation that writes into it, -1 for none.
    """

    def __init__(self, record: Record, results: Iterable[int]) -> None:
        self.record, n = record, len(record)
        self.birth = numpy.array(record.birth, dtype=numpy.int64)
        self.last = numpy.array(record.last_use, dtype=numpy.int64)
        self.storage = numpy.array(record.storage, dtype=numpy.int64)
        death = numpy.array(record.death, dtype=numpy.int64)
        self.nbytes, self.written = self._counted(results)
        storages = len(self.nbytes)
        self.start, self.stop = numpy.full(storages, n + 1), numpy.full(storages, -1)
        held = numpy.full(storages, -1)
        numpy.minimum.at(self.start, self.storage, self.birth + 1)
        numpy.maximum.at(self.stop, self.storage, self.last)
        numpy.maximum.at(held, self.storage, numpy.where(death == ALIVE, n, numpy.minimum(death - 1, n)))
        for external in record.externals:
            if external.storage in record.writes:
                self.start[external.storage] = 0
                self.stop[external.storage] = max(self.stop[external.storage], external.last_use)
        self.alive = self.spans(self.start, self.stop, self.nbytes)
        made = numpy.zeros(n + 1, dtype=numpy.int64)
        own = (self.start > 0) & (self.start <= n)
        numpy.add.at(made, self.start[own] - 1, self.nbytes[own])
        inner = numpy.array(record.inner_nbytes, dtype=numpy.int64)
        inner += numpy.array(record.transient_nbytes, dtype=numpy.int64)  # a backward takes about as much
        self.held = by_program = self.spans(self.start, numpy.maximum(held, self.stop), self.nbytes)
        self.made = made[:n] + inner
        self.running = numpy.maximum(self.alive, by_program)[:n] + self.made
        self._cotangents(inner)

    def _counted(self, results: Iterable[int]) -> tuple[Numbers, Numbers]:
        record = self.record
        others = numpy.array(record.storage_external, dtype=bool)
        for number in results:
            others[record.storage[number]] = True
        written = numpy.full(len(others), -1)
        for storage, operations in record.writes.items():
            written[storage] = operations[-1]
            if record.storage_external[storage]:
                others[storage] = False
        return numpy.where(others, 0, numpy.array(record.storage_nbytes, dtype=numpy.int64)), written

    def spans(self, start: Numbers, stop: Numbers, nbytes: Numbers) -> Numbers:
        """At every border, the bytes of what is there from border ``start`` to border ``stop``, both included."""
        n = len(self.record)
        there = stop >= start
        change = numpy.zeros(n + 3, dtype=numpy.int64)
        numpy.add.at(change, start[there], nbytes[there])
        numpy.add.at(change, stop[there] + 1, -nbytes[there])
        return numpy.cumsum(change)[: n + 1]

    def _cotangents(self, inner: Numbers) -> None:
        record, n = self.record, len(self.record)
        nbytes = numpy.array(record.cotangent_nbytes, dtype=numpy.int64)
        self.cotangent = self.spans(self.birth + 1, self.last, nbytes)
        arguments = numpy.array(record.arguments, dtype=numpy.int64)
        counts: Numbers = numpy.diff(numpy.array(record.argument_ends, dtype=numpy.int64), prepend=0)
        user = numpy.repeat(numpy.arange(n), counts)
        outside = numpy.array([e.tensor.nbytes if e.tensor.requires_grad else 0 for e in record.externals] or [0])
        own = arguments >= 0
        number = numpy.where(own, arguments, 0)
        some = len(nbytes) > 0
        given = numpy.where(own, nbytes[number] if some else 0, outside[numpy.where(own, 0, -1 - arguments)])
        given[numpy.array(record.ambient)[user] == self._without_grad()] = 0
        gradients = numpy.zeros(n, dtype=numpy.int64)
        numpy.add.at(gradients, user, given)
        # A gradient that joins what later users of a value gave: their sum may be new, beside both.
        joined = numpy.zeros(n, dtype=numpy.int64)
        if some:
            numpy.maximum.at(joined, user, numpy.where(own & (self.last[number] > user), given, 0))
        self.reversing = self.cotangent[1:] + gradients + joined + inner

    def _without_grad(self) -> int:
        found = [k for k, ambient in enumerate(self.record.ambients) if not ambient.grad]
        return found[0] if len(found) == 1 else -1

    def needed(self, k: int) -> frozenset[int]:
        """Values in the state before operation ``k``."""
        return frozenset(numpy.flatnonzero((self.birth < k) & (self.last >= k)).tolist())

    def waiting(self, k: int) -> int:
        """The most bytes of cotangents while what lies before border ``k`` has to be recorded again: that happens when
        backward asks for the last thing saved before it, and what is later than that is reversed by then."""
        before = numpy.flatnonzero(numpy.array(self.record.packs[:k]))
        return int(self.cotangent[(int(before[-1]) + 1 if before.size else 0) : k + 1].max())

    def copied(self, k: int) -> int:
        """Bytes of the state before operation ``k`` that it or later ones write into: these are copied."""
        there = (self.start <= k) & (self.stop >= k) & (self.written >= k)
        return int(self.nbytes[there].sum())

    def seconds(self) -> Numbers:
        """Of each operation."""
        return numpy.array(self.record.seconds, dtype=float)

    def saved(self) -> Numbers:
        """Bytes that each operation is the first to save."""
        storages, operations = self.saves()
        _, first = numpy.unique(storages, return_index=True)
        found = numpy.array(self.record.inner_nbytes, dtype=numpy.int64)
        numpy.add.at(found, operations[first], self.nbytes[storages[first]])
        return found

    def saved_before(self) -> Numbers:
        """Bytes saved before each operation, as the recorder counts them: results of the program too."""
        storages, operations = self.saves()
        _, first = numpy.unique(storages, return_index=True)
        found = numpy.array(self.record.inner_nbytes, dtype=numpy.int64)
        numpy.add.at(found, operations[first], numpy.array(self.record.storage_nbytes)[storages[first]])
        return numpy.cumsum(found) - found

    def saves(self) -> tuple[Numbers, Numbers]:
        """Storages that operations save, and these, in order."""
        counts: Numbers = numpy.diff(numpy.array(self.record.save_ends, dtype=numpy.int64), prepend=0)
        return numpy.array(self.record.saves, dtype=numpy.int64), numpy.repeat(numpy.arange(len(counts)), counts)


def stages_of(sizes: Sizes, cuts: list[int]) -> list["StageBytes"]:
    """Of each of the stretches between ``cuts``."""
    storages, operations = sizes.saves()
    borders = numpy.searchsorted(operations, cuts)
    return [
        StageBytes(sizes, a, b, storages[i:j], operations[i:j])
        for (a, b), (i, j) in zip(pairwise(cuts), pairwise(borders), strict=True)
    ]


class StageBytes:
    """Bytes of the operations a .. b-1 as one stage: ``saved`` beyond the states that backward is said to read,
    ``forward``, ``record`` and ``backward`` those of all that is there at the peak of each."""

    def __init__(self, sizes: Sizes, a: int, b: int, storages: Numbers, operations: Numbers) -> None:
        storages, first = numpy.unique(storages, return_index=True)
        at, nbytes = operations[first] - a, sizes.nbytes[storages]
        start, stop, written = sizes.start[storages], sizes.stop[storages], sizes.written[storages]
        before = (start <= a) & (stop >= a) & (written < a)
        after = (start <= b) & (stop >= b) & (written < b)
        # Backward reads a state where that is at least half of what it has of it; else its part counts by itself.
        self.reads_input = bool(2 * nbytes[before].sum() > sizes.alive[a])
        if self.reads_input:
            after &= ~before
        self.reads_output = bool(2 * nbytes[after].sum() > sizes.alive[b])
        counted = ~((before & self.reads_input) | (after & self.reads_output))
        inner = numpy.array(sizes.record.inner_nbytes[a:b], dtype=numpy.int64)
        self.saved = int(nbytes[counted].sum() + inner.sum())
        self.copied = sizes.copied(a)
        self.forward = int(sizes.running[a:b].max()) + self.copied
        # Saved and not alive any more: a storage counts once while it is both.
        dead = numpy.zeros(b - a + 1, dtype=numpy.int64)
        numpy.add.at(dead, numpy.clip(numpy.maximum(at + 1, stop - a + 1), 0, b - a), nbytes)
        dead = numpy.cumsum(dead)[: b - a] + numpy.cumsum(inner) - inner
        self.record = int((sizes.running[a:b] + dead).max()) + self.copied
        left = numpy.zeros(b - a, dtype=numpy.int64)
        numpy.add.at(left, at[counted], nbytes[counted])
        left = numpy.cumsum(left + inner)
        # What an operation has saved goes when an earlier one is reversed that has saved something too.
        savers = numpy.zeros(b - a, dtype=bool)
        savers[operations - a] = True
        savers |= inner > 0
        places = numpy.where(savers, numpy.arange(b - a), b - a - 1)
        after_it = numpy.minimum.accumulate(places[::-1])[::-1]
        self.backward = int((left[after_it] + sizes.reversing[a:b]).max())
