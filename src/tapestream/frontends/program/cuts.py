"""Where a recorded program is cut into stretches, and what these cost: the `Profile` that planners see."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy
from numpy.typing import NDArray

from tapestream.costs import Profile, StageCost
from tapestream.errors import BudgetError
from tapestream.executor.program.record import Record

_STAGES = 32
_MOST_STAGES = 128
Numbers = NDArray[Any]


class Borders:
    """What lies between the operations of a record. Border k stands before operation k, border ``len(record)`` last.

    ``nbytes``: of the values alive there, each storage once, those of others and of results left out. ``allowed``:
    where a stretch may begin with each value alive entering by itself.
    """

    def __init__(self, record: Record, results: Iterable[int]) -> None:
        self.record, n = record, len(record)
        self._birth = numpy.array(record.birth, dtype=numpy.int64)
        self._last = numpy.array(record.last_use, dtype=numpy.int64)
        self._storage = numpy.array(record.storage, dtype=numpy.int64)
        owned = numpy.array(record.storage_external, dtype=bool)
        for number in results:
            owned[record.storage[number]] = True
        self.nbytes = self._alive(owned)
        closed = numpy.zeros(n + 2, dtype=numpy.int64)
        self._close_written(closed)
        self._close_shared_casts(closed)
        self.allowed = numpy.cumsum(closed)[: n + 1] == 0
        self.allowed[[0, n]] = True

    def _alive(self, owned: Numbers) -> Numbers:
        n, storages = len(self.record), len(owned)
        start, stop = numpy.full(storages, n + 1), numpy.full(storages, -1)
        numpy.minimum.at(start, self._storage, self._birth + 1)
        numpy.maximum.at(stop, self._storage, self._last)
        size = numpy.where(owned | (stop < start), 0, numpy.array(self.record.storage_nbytes, dtype=numpy.int64))
        start, stop = numpy.minimum(start, n + 1), numpy.maximum(stop, start - 1)
        change = numpy.zeros(n + 3, dtype=numpy.int64)
        numpy.add.at(change, start, size)
        numpy.add.at(change, stop + 1, -size)
        return numpy.cumsum(change)[: n + 1]

    def _close_written(self, closed: Numbers) -> None:
        """Two values that show one storage and are older than a write into it belong together: a write by one changes
        what the other's gradient passes through, now or when the other is used next."""
        record = self.record
        shown: dict[int, list[tuple[int, int]]] = {storage: [] for storage in record.writes}
        for number in numpy.flatnonzero(numpy.isin(self._storage, list(shown))):
            shown[int(self._storage[number])].append((int(self._birth[number]) + 1, int(self._last[number])))
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

    def _close_shared_casts(self, closed: Numbers) -> None:
        """Autocast casts a weight once, and its uses add up in the cast's dtype: they stay in one stretch."""
        record = self.record
        casting = [any(on for _, on, _ in ambient.casts) and ambient.cache for ambient in record.ambients]
        if not any(casting):
            return
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for k in numpy.flatnonzero(numpy.array(casting)[numpy.array(record.ambient)]):
            for number in record.arguments_of(int(k)):
                if number < 0 and record.externals[~number].leaf and record.externals[~number].tensor.requires_grad:
                    key = number, record.ambients[record.ambient[int(k)]].epoch
                    spans[key] = spans.get(key, (int(k), 0))[0], int(k)
        for first, last in spans.values():
            closed[first + 1] += 1
            closed[last + 1] -= 1

    def cuts(self, budget: int | None, must: Iterable[int] = ()) -> list[int]:
        """Borders of stretches of balanced cost, each where little is alive; those in ``must`` among them.

        The less ``budget`` is beside what backward would keep, the more; None: a few.
        """
        record, n = self.record, len(self.record)
        limit = _STAGES if budget is None else _MOST_STAGES
        if n <= limit:
            return [0, *(numpy.flatnonzero(self.allowed[1:n]) + 1).tolist(), n]
        saved, seconds = numpy.array(record.saved, dtype=float), numpy.array(record.seconds, dtype=float)
        most = min(n, _MOST_STAGES, max(_STAGES, int(4 * saved.sum() / max(1, budget)) if budget else 0))
        weight = saved / max(1.0, saved.sum()) + seconds / max(1e-9, seconds.sum()) + 1 / n
        reached = numpy.concatenate(([0.0], numpy.cumsum(weight)))
        edges = numpy.searchsorted(reached, numpy.linspace(0, reached[-1], most + 1)).tolist()
        found = {0, n, *(k for k in must if self.allowed[k])}
        for a, b in pairwise(edges):
            window = numpy.arange(max(1, a), min(n, b))
            window = window[self.allowed[window]]
            if window.size:
                found.add(int(window[numpy.argmin(self.nbytes[window])]))
        return sorted(found)

    def profile(self, cuts: Sequence[int]) -> Profile:
        """The stretches between ``cuts`` as stages. What a storage that several borders share costs counts at each."""
        saved = numpy.concatenate(([0], numpy.cumsum(numpy.array(self.record.saved, dtype=numpy.int64))))
        seconds = numpy.concatenate(([0.0], numpy.cumsum(numpy.array(self.record.seconds, dtype=float))))
        # While the sum of a weight's gradients grows, there are the old one, what is added and the new one.
        gradient = 2 * max((e.tensor.nbytes for e in self.record.externals if e.tensor.requires_grad), default=0)
        largest = numpy.zeros(
            len(self.record), dtype=numpy.int64
        )  # of what each operation makes: so are its cotangents
        numpy.maximum.at(largest, self._birth, numpy.array(self.record.storage_nbytes)[self._storage])
        stages = []
        for a, b in pairwise(cuts):
            inside = int(self.nbytes[a : b + 1].max() - max(self.nbytes[a], self.nbytes[b]))
            taken = float(seconds[b] - seconds[a])
            stages.append(
                StageCost(
                    taken,
                    2 * taken,
                    int(self.nbytes[b]) + self.record.draws_nbytes,
                    int(saved[b] - saved[a]),
                    forward_extra_nbytes=inside,
                    backward_extra_nbytes=inside + gradient + 2 * int(largest[a:b].max(initial=0)),
                )
            )
        return Profile(tuple(stages), int(self.nbytes[cuts[0]]))


def binomial_slots(profile: Profile, budget: int) -> int:
    """As many restart checkpoints as surely fit beside what runs, however the stages differ. Raises BudgetError."""
    states = [profile.state_nbytes(k) for k in range(len(profile) + 1)]
    running = max(
        before + after + profile.stages[k].cotangent_bytes + profile.cotangent_nbytes(k)
        + profile.stages[k].saved_nbytes + profile.stages[k].backward_extra_nbytes
        for k, (before, after) in enumerate(pairwise(states))
    )  # fmt: skip
    largest = max(1, *states)
    if running + largest > budget:
        least = running + largest
        raise BudgetError(f"the least that surely suffices is {least} bytes", least_nbytes=least)
    return max(1, min(len(profile), (budget - running) // largest))
