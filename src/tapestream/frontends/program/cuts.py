"""Where a recorded program is cut into stretches, and what these cost: the `Profile` that planners see."""

import copy
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy

from tapestream.costs import Profile, StageCost
from tapestream.executor.program.record.record import Record
from tapestream.executor.program.replay.needed import RUN, Asked, Needed
from tapestream.frontends.program.sizes import Numbers, Sizes, stages_of

FEW, MANY = 32, 256
"""Stretches: as many as planners with tables take in a tenth of a second, and as those without in a hundredth."""
FEWER = (range(16, 21), range(21, 27), range(27, 33))
"""Other numbers that the quickest of those is tried with, one of each: that which suits blocks that come again."""
_WORTH = 16
"""Of the largest state, the part that lasts and is worth counting once."""
_ABOUT = 0.4  # of its size, by which a stretch may be longer or shorter


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Of what operation ``made_by`` makes: ``values``; and, for it itself in ``operations``, all that it has made of
    what it saves. Bytes of ``storages``, ``-1 - made_by`` for what no value shows."""

    made_by: int
    values: frozenset[int]
    operations: frozenset[int]
    storages: Mapping[int, int]

    def beside(self, held: Container[int]) -> int:
        """Bytes beside the storages ``held``."""
        return sum(nbytes for storage, nbytes in self.storages.items() if storage not in held)


class Borders:
    """What lies between the operations of a record. Border k stands before operation k, border ``len(record)`` last.

    ``allowed``: where a stretch may begin with each value alive entering by itself. ``gradients_within``: see
    `Program`.
    """

    def __init__(self, record: Record, results: Iterable[int], *, gradients_within: bool = False) -> None:
        self.record, n = record, len(record)
        self.sizes = Sizes(record, results, gradients_within=gradients_within)
        self._needed, self._seconds = Needed(record), self.sizes.seconds()
        self._counted, self._lasting = self.sizes, list[int]()
        closed = numpy.zeros(n + 2, dtype=numpy.int64)
        self._close_written(closed)
        self.allowed = numpy.cumsum(closed)[: n + 1] == 0
        self.allowed[[0, n]] = True

    def _close_written(self, closed: Numbers) -> None:
        """Two values that show one storage and are older than a write into it belong together: a write by one changes
        what the other's gradient passes through, now or when the other is used next."""
        record, sizes = self.record, self.sizes
        shown: dict[int, list[tuple[int, int]]] = {storage: [] for storage in record.writes}
        for number in numpy.flatnonzero(numpy.isin(sizes.storage, list(shown))):
            shown[int(sizes.storage[number])].append((int(sizes.birth[number]) + 1, int(sizes.last[number])))
        for external in record.externals:
            if external.storage in shown:
                shown[external.storage].append((0, external.last_use))
        for storage, spans in shown.items():
            last = record.writes[storage][-1]
            older = [(a, b) for a, b in spans if a <= last and a <= b]
            events = sorted([(a, 1) for a, _ in older] + [(b + 1, -1) for _, b in older])
            count = 0
            for (at, by), (after, _) in pairwise(events):
                count += by
                if count >= 2:
                    closed[at] += 1
                    closed[after] -= 1

    @functools.cached_property
    def ways(self) -> "tuple[Borders, ...]":
        """These, which count each state by itself; and, if that may be less, the same with what lasts nearly all the
        time counted once and all the time, whether any state is held or none.

        Many states that hold one storage take it once: what is made again of it is made when nothing is left of what
        was made before, since planners reverse what is later first. Not so where saved tensors stay of a part of a
        stretch of which the rest runs again (see `tail_allowed`), or where copies move.
        """
        lasting = self.sizes.lasting()
        if _WORTH * self.sizes.nbytes[lasting].sum() < self.sizes.alive.max(initial=1):
            return (self,)
        once = copy.copy(self)
        once._lasting, once._counted = lasting, self.sizes.without(lasting)
        return self, once

    def tail_allowed(self, first: int, start: int) -> bool:
        """Whether saved tensors from operation ``start`` on may stay of a stretch that runs again from ``first`` on."""
        born = self.sizes.start[self._lasting]
        return bool(self.allowed[start]) and not bool(((born > first) & (born <= start)).any())

    def cuts(self, most: int, must: Iterable[int] = (), *, timed: bool = True) -> list[int]:
        """Borders of at most ``most`` stretches of balanced cost, each where little is alive; and those in ``must``.

        ``timed`` False: the cost is bytes alone, without measured seconds, so that every call finds the same.
        """
        n, sizes = len(self.record), self._counted
        found = {0, n, *(k for k in must if self.allowed[k])}
        if n <= most:
            return sorted({*found, *numpy.flatnonzero(self.allowed).tolist()})
        saved, seconds = sizes.saved().astype(float), sizes.seconds()
        weight = saved / max(1.0, saved.sum()) + 1 / n
        if timed:
            weight += seconds / max(1e-9, seconds.sum())
        reached = numpy.concatenate(([0.0], numpy.cumsum(weight)))
        edges = [0, *numpy.searchsorted(reached, numpy.linspace(0, reached[-1], min(n, most) + 1)[1:-1]).tolist(), n]
        for a, b in pairwise(edges[1:]):
            window = numpy.arange(max(1, a), min(n, b))
            window = window[self.allowed[window]]
            if window.size:
                found.add(int(window[numpy.argmin(sizes.alive[window] + sizes.held[window])]))
        return sorted(found)

    def tapered(self, last_nbytes: float, growth: float) -> list[int]:
        """Borders of stretches of which the last saves about ``last_nbytes`` bytes, and each one ``growth`` times as
        much as the next, where little is alive: what is kept for the later ones is gone when an earlier one is
        reversed, which may then need more."""
        n, sizes = len(self.record), self._counted
        saved = numpy.concatenate(([0], numpy.cumsum(sizes.saved())))
        found, end, size = [n], float(saved[-1]), max(1.0, last_nbytes)
        while end > size:
            end -= size
            near = numpy.arange(*numpy.searchsorted(saved, (end - _ABOUT * size, end + _ABOUT * size)))
            near = near[(near > 0) & (near < found[-1])]
            near = near[self.allowed[near]]
            if near.size:
                found.append(int(near[numpy.lexsort((abs(saved[near] - end), sizes.alive[near]))[0]]))
                end = min(end, float(saved[found[-1]]))
            size *= growth
        return [0, *reversed(found)]

    def suiting(self, numbers: Iterable[int]) -> list[int]:
        """`cuts` for the one of ``numbers`` of which the largest stretch saves least, the smallest of equals: a number
        that does not suit blocks that come again has two of them in one stretch. By bytes alone, too: seconds measured
        on a busy machine may hide the blocks."""
        tried = [self.cuts(most, timed=timed) for most in numbers for timed in (True, False)]
        return min(tried, key=lambda cuts: (self._largest(cuts), len(cuts)))

    def _largest(self, cuts: Sequence[int]) -> int:
        return max(one.saved for one in stages_of(self._counted, list(cuts)))

    def needed_seconds(self, first: int, end: int, there: Container[int] = (), saves: Container[int] = ()) -> float:
        """Seconds of what has to run again of a stretch, of which the values ``there`` are kept, and what the
        operations ``saves`` have made themselves of what they save (see `Needed`)."""
        todo = numpy.frombuffer(self._needed.of(first, end, there, saves), dtype=numpy.uint8)
        return float(self._seconds[first:end][todo == RUN].sum())

    def asked(self, first: int, end: int) -> Asked:
        """What has to run again of a stretch, as more and more of what it makes is kept."""
        return self._needed.asked(first, end, self._seconds[first:end].tolist())

    def may_be_held(self, first: int, end: int) -> list[Piece]:
        """What a stretch makes again for what it saves, and what stays as it is made."""
        found, todo = list[Piece](), self._needed.of(first, end, ())
        for k in (k for k in range(first, end) if todo[k - first] == RUN):
            values = self._made(k)
            if self._needed.may_be_held(k):
                saves, record = set(self.record.saves_of(k)), self.record
                own = {number: storage for number, storage in values.items() if storage in saves}
                # What is written into later has no number among those.
                if own.keys() >= {n for n in record.results_of(k) if n >= 0 and record.storage[n] in saves}:
                    storages = {**self._nbytes(own.values()), -1 - k: record.inner_nbytes[k]}
                    found.append(Piece(k, frozenset(own), frozenset((k,)), storages))
                    values = {n: storage for n, storage in values.items() if n not in own}
            found += [Piece(k, frozenset((n,)), frozenset(), self._nbytes((s,))) for n, s in values.items()]
        return found

    def _made(self, k: int) -> dict[int, int]:
        """What operation ``k`` makes that takes memory and stays as it is: storages by value."""
        record = self.record
        new = {n: record.storage[n] for n in record.results_of(k) if n >= 0 and record.birth[n] == k}
        return {n: one for n, one in new.items() if one not in record.writes and self._counted.nbytes[one]}

    def _nbytes(self, storages: Iterable[int]) -> dict[int, int]:
        return {storage: int(self._counted.nbytes[storage]) for storage in storages}

    def alive_at(self, border: int) -> frozenset[int]:
        """Storages of values in the state there."""
        sizes = self.sizes
        return frozenset(numpy.flatnonzero((sizes.start <= border) & (sizes.stop >= border)).tolist())

    def tail_nbytes(self, start: int, end: int) -> int:
        """Bytes that keeping what a stretch saves takes, with the states that its backward reads."""
        (one,), alive = stages_of(self._counted, [start, end]), self._counted.alive
        return one.saved + int(one.reads_input and alive[start]) + int(one.reads_output and alive[end])

    def profile(self, cuts: Sequence[int]) -> Profile:
        """The stretches between ``cuts`` as stages. What a storage that several borders share costs counts at each."""
        sizes, draws = self._counted, self.record.draws_nbytes
        both = (sizes.seconds(), sizes.reversing_seconds())
        seconds, reversing = (numpy.concatenate(([0.0], numpy.cumsum(one))) for one in both)
        stages = []
        for (a, b), one in zip(pairwise(cuts), stages_of(sizes, list(cuts)), strict=True):
            states, cotangents = int(sizes.alive[a] + sizes.alive[b]), [sizes.waiting(k) for k in (a, b)]
            gradients = int(sizes.gradients[a:b].sum())
            stages.append(
                StageCost(
                    float(seconds[b] - seconds[a]),
                    float(reversing[b] - reversing[a]),
                    int(sizes.alive[b]) + draws,
                    one.saved,
                    reads_input=one.reads_input,
                    reads_output=one.reads_output,
                    forward_extra_nbytes=max(0, one.forward - states),
                    record_extra_nbytes=max(0, one.record - states - one.saved),
                    backward_extra_nbytes=max(
                        -one.saved - cotangents[1], one.backward - one.saved - sum(cotangents) - gradients
                    ),
                    cotangent_nbytes=cotangents[1],
                    gradient_nbytes=gradients,
                    saved_storages=max(1, one.copies),
                )
            )
        # State 0 and the generators that backward is to leave as they were are there all the time; and copies of what
        # is never read until that is known for sure.
        initial, unread = int(sizes.alive[0]), sum(self.record.storage_nbytes[s] for s in self.record.unread.storages)
        lasting = int(self.sizes.nbytes[self._lasting].sum())
        return Profile(tuple(stages), initial, outside_nbytes=2 * draws + initial + unread + lasting)


def binomial_slots(profile: Profile, budget: int) -> int:
    """As many restart checkpoints as surely fit beside what runs, however the stages differ; at least 1."""
    states = [profile.state_nbytes(k) for k in range(len(profile) + 1)]
    running = max(
        before + after + cost.saved_nbytes
        + max(cost.forward_extra_nbytes, cost.recorded_extra_nbytes,
              profile.cotangent_nbytes(k) + cost.cotangent_bytes + cost.backward_extra_nbytes)
        for k, ((before, after), cost) in enumerate(zip(pairwise(states), profile.stages, strict=True))
    )  # fmt: skip
    room = budget - running - profile.outside_nbytes - sum(cost.gradient_nbytes for cost in profile.stages)
    return max(1, min(len(profile), room // max(1, *states)))
