"""Storages that several values share: which of them are there, so that their bytes count once."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from tapestream.costs import SharedStorage


class Once:
    """Which of the ``storages`` are there. A storage is in a row of states, so that which of those are held is enough
    to know: nothing is counted storage by storage but what comes or goes.

    Every method says by how many bytes what values take by themselves is more, or less, than what is there.
    ``nbytes``: by how many it is now.
    """

    __slots__ = ("_again", "_ends", "_held", "_in_tape", "_made", "_storages", "_tapes", "_whole", "nbytes")

    def __init__(self, storages: Sequence[SharedStorage], stages: int) -> None:
        self._storages, self._tapes, self.nbytes = storages, [0] * len(storages), 0
        self._held: list[int] = []  # states, in order
        self._again: dict[int, int] = {}  # by storage, how often it was made again while it was there
        self._made: list[list[int]] = [[] for _ in range(stages + 2)]  # by state, the first or the last that has them
        self._ends: list[list[int]] = [[] for _ in range(stages + 2)]
        self._in_tape: dict[int, list[int]] = {}
        self._whole = [0] * (stages + 2)  # by state, all that it shares
        for number, one in enumerate(storages):
            self._made[one.first].append(number)
            self._ends[one.last].append(number)
            self._whole[one.first] += one.nbytes
            self._whole[one.last + 1] -= one.nbytes
            for stage in one.tapes:
                self._in_tape.setdefault(stage, []).append(number)
        for state in range(1, stages + 2):
            self._whole[state] += self._whole[state - 1]

    def hold(self, k: int) -> int:
        """State ``k`` is held from now on."""
        before, after = self._around(k)
        insort(self._held, k)
        new = sum(self._storages[i].nbytes for i in self._between(before, k, after) if not self._tapes[i])
        return self._more(self._whole[k] - new)

    def release(self, k: int) -> int:
        """Nobody holds state ``k`` any more."""
        self._held.remove(k)
        before, after = self._around(k)
        gone = [i for i in self._between(before, k, after) if not self._tapes[i]]
        return -self._more(self._gone(gone) - self._whole[k])

    def record(self, stage: int) -> int:
        """The saved tensors of ``stage`` are there from now on."""
        there, tapes = 0, self._tapes
        for i in self._in_tape.get(stage, ()):
            if tapes[i] or self._in_state(i):
                there += self._storages[i].nbytes
            tapes[i] += 1
        return self._more(there)

    def forget(self, stage: int) -> int:
        """The saved tensors of ``stage`` are gone."""
        tapes, gone, whole = self._tapes, list[int](), 0
        for i in self._in_tape.get(stage, ()):
            tapes[i] -= 1
            whole += self._storages[i].nbytes
            if not tapes[i] and not self._in_state(i):
                gone.append(i)
        return -self._more(self._gone(gone) - whole)

    def made(self, k: int) -> int:
        """A run makes state ``k``. What it makes of storages that are there is beside them until all of that goes."""
        again = [i for i in self._made[k] if self._tapes[i] or self._in_state(i)]
        for i in again:
            self._again[i] = self._again.get(i, 0) + 1
        return self._more(-sum(self._storages[i].nbytes for i in again))

    def _more(self, nbytes: int) -> int:
        self.nbytes += nbytes
        return nbytes

    def _gone(self, storages: list[int]) -> int:
        found = 0
        for i in storages:
            found += self._storages[i].nbytes
            if i in self._again:
                found += self._storages[i].nbytes * self._again.pop(i)
        return found

    def _around(self, k: int) -> tuple[int, int]:
        """The held states before and after ``k``."""
        held, at = self._held, bisect_left(self._held, k)
        return held[at - 1] if at else -1, held[at] if at < len(held) else len(self._whole)

    def _between(self, before: int, k: int, after: int) -> Iterator[int]:
        """Storages of state ``k`` that neither state ``before`` it nor state ``after`` it has."""
        storages = self._storages
        if after - k <= k - before:
            for state in range(k, min(after, len(self._ends))):
                yield from (i for i in self._ends[state] if before < storages[i].first <= k)
        else:
            for state in range(before + 1, k + 1):
                yield from (i for i in self._made[state] if k <= storages[i].last < after)

    def _in_state(self, i: int) -> bool:
        """Whether a held state has the storage."""
        one, held = self._storages[i], self._held
        at = bisect_left(held, one.first)
        return at < len(held) and held[at] <= one.last
