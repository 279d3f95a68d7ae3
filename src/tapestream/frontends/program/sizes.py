"""Bytes of a recorded program, operation by operation: what is alive, made, saved and given back as gradients."""

import copy
import functools
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

from tapestream.executor.program.calls.values import nbytes_of
from tapestream.executor.program.record.record import ALIVE, Record
from tapestream.executor.travel.cargo import SMALL_NBYTES
from tapestream.frontends.program.parts import parts

Numbers = NDArray[Any]
_LASTING = 0.75  # of the program
_FAR_APART = 6364136223846793005  # of linear congruential generators: products that are equal by chance are rare


class Sizes:
    """Storages of arguments and captured tensors are others' and count nothing, except that what the program writes
    into of captured ones is part of every state from the beginning to its last use. Those of results are the caller's
    once no operation uses them any more; but what replays make and save of them is made anew.

    ``alive``: at border k (before operation k, border n last) what later operations need, each storage once.
    ``held``: the same, with what the program itself still holds.
    ``running``: while operation k runs, with what it makes: the larger of what replays and the program itself hold.
    ``cotangent``: at border k those of the values alive there. ``reversing``: while operation k is reversed, all
    cotangents that there are. ``gradients``: with ``gradients_within`` those of leaves (parameters) that backward of k
    is the first to make, and that stay; on their way there they count besides, since autograd may copy them, and those
    that are added twice, since the sum may be new. ``start``, ``stop``: by storage, the borders between which it is
    alive. ``written``: by storage, the last operation that writes into it, -1 for none.
    """

    def __init__(self, record: Record, results: Iterable[int], *, gradients_within: bool = False) -> None:
        self.record, n = record, len(record)
        self.birth, self.last = numpy.asarray(record.birth), numpy.asarray(record.last_use)
        self.storage, death = numpy.asarray(record.storage), numpy.asarray(record.death)
        self.results = numpy.array(list(results), dtype=numpy.int64)
        self.nbytes, self.written = self._counted()
        storages = len(self.nbytes)
        self.start, self.stop, held = (numpy.full(storages, k, dtype=numpy.int32) for k in (n + 1, -1, -1))
        numpy.minimum.at(self.start, self.storage, self.birth + 1)
        numpy.maximum.at(self.stop, self.storage, self.last)
        numpy.maximum.at(held, self.storage, numpy.where(death == ALIVE, n, numpy.minimum(death - 1, n)))
        read = record.writes.keys() - record.left_alone
        self._written_outside = [(~k, e.last_use) for k, e in enumerate(record.externals) if e.storage in read]
        for number, last in self._written_outside:
            storage = record.externals[~number].storage
            self.start[storage], self.stop[storage] = 0, max(self.stop[storage], last)
        reached = numpy.ones(n, dtype=bool)
        reached[[*record.unreached]] = False
        self._reached, self.inner = reached, numpy.asarray(record.inner_nbytes, dtype=numpy.int64) * reached
        packs = numpy.where(
            (numpy.asarray(record.packs) > 0) & reached, numpy.arange(n, dtype=numpy.int32), numpy.int32(-1)
        )
        self._packed = numpy.maximum.accumulate(packs)  # by operation, the last one up to it that saves anything
        self._by_stop = numpy.argsort(self.stop).astype(numpy.int32)
        held[self.storage[self.results]] = -1
        self._held_until = numpy.maximum(held, self.stop)
        self._count()
        self._cotangents(gradients_within)

    def _count(self) -> None:
        """What depends on the bytes of storages."""
        record, n = self.record, len(self.record)
        self.alive = self.spans(self.start, self.stop, self.nbytes)
        self._copied = self.spans(self.start, numpy.minimum(self.stop, self.written), self.nbytes)
        made = numpy.zeros(n + 1, dtype=numpy.int64)
        own = (self.start > 0) & (self.start <= n)
        numpy.add.at(made, self.start[own] - 1, self.nbytes[own])
        inner = self.inner + numpy.asarray(record.transient_nbytes)
        for k in record.settled.aside:  # into copies
            inner[k] += sum(nbytes_of(record.externals[~n].held) for n in record.arguments_of(k) if n < 0)
        self.held = by_program = self.spans(self.start, self._held_until, self.nbytes)
        self.made = made[:n] + inner
        self.running = numpy.maximum(self.alive, by_program)[:n] + self.made

    def lasting(self) -> list[int]:
        """Storages that are there nearly all the time, so that many states hold the same. None that is written into:
        restart checkpoints hold copies of those. None where arrays are given, of which they hold copies, too."""
        there = numpy.minimum(self.stop, len(self.record)) - self.start
        long = (there >= _LASTING * len(self.record)) & (self.start > 0) & (self.written < 0) & (self.nbytes > 0)
        return [] if self.record.arrays.met else numpy.flatnonzero(long).tolist()

    def without(self, storages: Sequence[int]) -> "Sizes":
        """The same, where these count nothing."""
        found = copy.copy(self)
        found.nbytes = self.nbytes.copy()
        found.nbytes[list(storages)] = 0
        found._count()
        return found

    def _counted(self) -> tuple[Numbers, Numbers]:
        record = self.record
        others = numpy.array(record.storage_external, dtype=bool)
        written = numpy.full(len(others), -1, dtype=numpy.int32)
        for storage, operations in record.writes.items():
            written[storage] = operations[-1]
            if record.storage_external[storage] and storage not in record.left_alone:
                others[storage] = False
        return numpy.where(others, 0, numpy.asarray(record.storage_nbytes)), written

    def spans(self, start: Numbers, stop: Numbers, nbytes: Numbers) -> Numbers:
        """At every border, the bytes of what is there from border ``start`` to border ``stop``, both included."""
        n = len(self.record)
        there = stop >= start
        change = numpy.zeros(n + 3, dtype=numpy.int64)
        numpy.add.at(change, start[there], nbytes[there])
        numpy.add.at(change, stop[there] + 1, -nbytes[there])
        return numpy.cumsum(change)[: n + 1]

    def _cotangents(self, gradients_within: bool) -> None:
        record, n = self.record, len(self.record)
        arguments = numpy.asarray(record.arguments)
        nbytes = numpy.asarray(record.cotangent_nbytes) * self._reached[self.birth]
        user = _operations(record.argument_ends)
        last = self._last_reached(arguments, user)
        last[self.results] = n  # backward begins with the cotangents of all results
        self.cotangent = self._there(nbytes, arguments, user, last)
        given = self._given_back(nbytes, arguments, user)
        self.gradients, gradients = numpy.zeros(n, dtype=numpy.int64), numpy.zeros(n, dtype=numpy.int64)
        self._leaves(arguments, user, given, gradients_within)
        numpy.add.at(gradients, user, given)
        # A gradient that joins what later users of a value gave: their sum may be new, beside both.
        joined = numpy.zeros(n, dtype=numpy.int64)
        if len(nbytes):
            given[(arguments < 0) | (last[numpy.maximum(arguments, 0)] <= user)] = 0
            numpy.maximum.at(joined, user, given)
        self.reversing = self.cotangent[1:] + gradients + joined + numpy.asarray(record.reverse_nbytes) * self._reached

    def _last_reached(self, arguments: Numbers, user: Numbers) -> Numbers:
        """By value, the last operation that uses it and that backward reaches."""
        if self._reached.all():
            return self.last.copy()
        last, uses = self.birth.copy(), (arguments >= 0) & self._reached[user]
        numpy.maximum.at(last, arguments[uses], user[uses])
        return last

    def _there(self, nbytes: Numbers, arguments: Numbers, user: Numbers, last: Numbers) -> Numbers:
        """See ``cotangent``."""
        until, since = numpy.maximum(self.birth, self._gained()) + 1, last.copy()
        whole, parted = parts(self.record, self.birth, arguments, user)
        for value, border in whole.items():
            until[value] = min(border, until[value])
        for value, border in parted.items():
            since[value] = min(border, since[value])
        found = self.spans(until, since, nbytes)
        for external in self.record.externals:
            if external.own:  # its cotangent waits for what is not noted
                found[: external.last_use + 1] += nbytes_of(external.held)
        return found

    def _gained(self) -> Numbers:
        """By value, the operation by whose write it came to require a gradient, -1 for those made with that need."""
        found: Numbers = numpy.full(len(self.birth), -1, dtype=numpy.int64)
        for value, k in self.record.gained.items():
            found[value] = k
        return found

    def _given_back(self, nbytes: Numbers, arguments: Numbers, user: Numbers) -> Numbers:
        """By argument, the bytes of the gradient that its operation gives."""
        given = nbytes[numpy.maximum(arguments, 0)] if len(nbytes) else numpy.zeros(len(arguments), dtype=numpy.int64)
        outside = numpy.array([nbytes_of(e.held) if e.takes else 0 for e in self.record.externals] or [0])
        places = numpy.flatnonzero(arguments < 0)
        given[places] = outside[~arguments[places]]
        if self.record.gained:
            given[(arguments >= 0) & (user <= self._gained()[numpy.maximum(arguments, 0)])] = 0
        given[~self._reached[user]] = 0
        without = self._without_grad()
        if without >= 0:
            given[numpy.asarray(self.record.ambient)[user] == without] = 0
        return given

    def _leaves(self, arguments: Numbers, user: Numbers, given: Numbers, gradients_within: bool) -> None:
        """Gradients of leaves are made first at their last use, and may stay; those of other uses are added to them,
        into a sum that may be new."""
        externals = self.record.externals
        leaves = numpy.array([e.leaf for e in externals] or [False])
        (places,) = numpy.nonzero((arguments < 0) & (given > 0) & leaves[numpy.where(arguments < 0, ~arguments, 0)])
        last = numpy.full(len(leaves), -1, dtype=numpy.int64)
        last[~arguments[places]] = places  # in order: the last place of each
        first = last[last >= 0]
        if gradients_within:
            numpy.add.at(self.gradients, user[first], given[first])
        given[numpy.setdiff1d(places, first)] *= 2

    def _without_grad(self) -> int:
        found = [k for k, ambient in enumerate(self.record.ambients) if not ambient.grad]
        return found[0] if len(found) == 1 else -1

    def needed(self, k: int) -> frozenset[int]:
        """The state before operation ``k``: values, and by ``~k`` the external tensors that operations write into."""
        values = numpy.flatnonzero((self.birth < k) & (self.last >= k)).tolist()
        return frozenset((*values, *(number for number, last in self._written_outside if last >= k)))

    def waiting(self, k: int) -> int:
        """The most bytes of cotangents while what lies before border ``k`` has to be recorded again: that happens when
        backward asks for the last thing saved before it, and what is later than that is reversed by then."""
        before = int(self._packed[k - 1]) if k else -1
        return int(self.cotangent[before + 1 : k + 1].max())

    def copied(self, k: int) -> int:
        """Bytes of the state before operation ``k`` that it or later ones write into: these are copied."""
        return int(self._copied[k])

    def ending(self, a: int, b: int) -> Numbers:
        """Storages alive at border ``a`` of which the last use is one of the operations a .. b-1."""
        first, end = numpy.searchsorted(self.stop, (a, b), sorter=self._by_stop)
        found = self._by_stop[first:end]
        return found[self.start[found] <= a]

    @property
    def bound_nbytes(self) -> int:
        """No plan takes less: some operation makes so much, or has so much around it when it is reversed."""
        return int(max(self.reversing.max(), self.made.max())) if len(self.record) else 0

    def seconds(self) -> Numbers:
        """Of each operation: the median of those of its kind that make, save and take as much."""
        return self._seconds

    def reversing_seconds(self) -> Numbers:
        """Of the backward of each operation: twice its own, and none of what makes nothing that takes a gradient."""
        record = self.record
        takes = numpy.zeros(len(record), dtype=bool)
        takes[self.birth[(numpy.asarray(record.cotangent_nbytes) > 0) & (self.birth >= 0)]] = True
        takes |= numpy.asarray(record.packs) > 0
        found: Numbers = 2 * self.seconds() * (takes & self._reached)
        return found

    @functools.cached_property
    def _seconds(self) -> Numbers:
        record, n, seconds = self.record, len(self.record), numpy.array(self.record.seconds, dtype=float)
        kinds = numpy.array([pattern.kind for pattern in record.patterns.all], dtype=numpy.int64)
        alike = kinds[numpy.asarray(record.calls)] if n else numpy.zeros(0, dtype=numpy.int64)
        for part in (record.looks, record.reverse_nbytes, self.made):
            alike *= _FAR_APART
            alike += numpy.asarray(part)
        order = numpy.lexsort((seconds, alike))
        alike = alike[order]
        first = numpy.flatnonzero(numpy.concatenate(([True], alike[1:] != alike[:-1]))) if n else order
        counts = numpy.diff(first, append=n)
        found: Numbers = numpy.empty_like(seconds)
        found[order] = numpy.repeat(seconds[order[first + (counts - 1) // 2]], counts)
        return found

    def saved(self) -> Numbers:
        """Bytes that each operation is the first to save."""
        storages, operations = self.saves()
        _, first = numpy.unique(storages, return_index=True)
        found = self.inner.copy()
        numpy.add.at(found, operations[first], self.nbytes[storages[first]])
        return found

    def saved_before(self) -> Numbers:
        """Bytes saved before each operation, as the recorder counts them: results of the program too, and what
        backward does not reach."""
        storages, operations = self._all_saves()
        _, first = numpy.unique(storages, return_index=True)
        found = numpy.array(self.record.inner_nbytes, dtype=numpy.int64)
        numpy.add.at(found, operations[first], numpy.array(self.record.storage_nbytes)[storages[first]])
        return numpy.cumsum(found) - found

    def saves(self) -> tuple[Numbers, Numbers]:
        """Storages that operations save, and these, in order, but for what backward does not reach."""
        storages, operations = self._all_saves()
        reached = self._reached[operations]
        return (storages, operations) if reached.all() else (storages[reached], operations[reached])

    def _all_saves(self) -> tuple[Numbers, Numbers]:
        return numpy.asarray(self.record.saves), _operations(self.record.save_ends)


def _operations(ends: Sequence[int]) -> Numbers:
    """Of each argument, or what is saved, the operation: ``ends`` of those of each."""
    counts: Numbers = numpy.diff(numpy.asarray(ends).astype(numpy.int64), prepend=0)
    return numpy.repeat(numpy.arange(len(counts), dtype=numpy.int32), counts)


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
    many ``copies`` when they move,
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
        inner = sizes.inner[a:b]
        self.saved = int(nbytes[counted].sum() + inner.sum())
        pieces = numpy.concatenate((nbytes[counted], inner[inner > 0]))
        large = int((pieces >= SMALL_NBYTES).sum())
        self.copies = large + (len(pieces) > large)
        self.copied = sizes.copied(a)
        # The state before the stage counts as long as the stage runs: it may be a restart checkpoint.
        entering = sizes.ending(a, b - 1)
        gone = self._since(sizes.stop[entering] - a + 1, sizes.nbytes[entering], b - a)
        self.forward = int((sizes.running[a:b] + gone).max()) + self.copied
        # Saved and not alive any more: a storage counts once while it is both.
        entering = numpy.setdiff1d(entering, storages, assume_unique=True)
        gone = self._since(sizes.stop[entering] - a + 1, sizes.nbytes[entering], b - a)
        gone += self._since(numpy.maximum(at + 1, stop - a + 1), nbytes, b - a) + numpy.cumsum(inner) - inner
        self.record = int((sizes.running[a:b] + gone).max()) + self.copied
        left = numpy.zeros(b - a, dtype=numpy.int64)
        numpy.add.at(left, at[counted], nbytes[counted])
        left = numpy.cumsum(left + inner)
        # What an operation has saved goes when an earlier one is reversed that has saved something too.
        savers = numpy.zeros(b - a, dtype=bool)
        savers[operations - a] = True
        savers |= inner > 0
        places = numpy.where(savers, numpy.arange(b - a), b - a - 1)
        after_it = numpy.minimum.accumulate(places[::-1])[::-1]
        made = numpy.cumsum(sizes.gradients[a:b][::-1])[::-1]  # those of leaves come while what was saved goes
        self.backward = int((left[after_it] + sizes.reversing[a:b] + made).max())

    @staticmethod
    def _since(places: Numbers, nbytes: Numbers, length: int) -> Numbers:
        """At each of so many places, the bytes of what counts from a place on."""
        found = numpy.zeros(length + 1, dtype=numpy.int64)
        numpy.add.at(found, numpy.clip(places, 0, length), nbytes)
        return numpy.cumsum(found)[:length]
