"""Which operations of a stretch have to run again for what the stretch saves, given values that are there already."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.record.record import MIXED, Record

SKIP, SAVE, RUN = range(3)
"""What to do with an operation: nothing, call it until it has saved what it is given, or call it."""


class _Row(NamedTuple):
    """What is asked of operation ``k`` where nobody needs its results: ``alone``, and ``held`` where what it has made
    itself of what it saves is there."""

    k: int
    results: tuple[int, ...]
    arguments: tuple[int, ...]
    alone: int
    held: int


class Needed:
    """Of the operations of ``record``.

    What an operation saves of what it is given it has saved before it computes: it is called until then, if nobody
    needs its results, and what it has made itself of what it saves is none or is there. One that writes, draws, or is
    what users have written always runs: a later write tells that what was saved has changed, and draws come in their
    order. Not so where nothing reads what it writes into (see `Unread`). One that gives back what was there before
    (``requires_grad_()``) runs, too: that it is there does not say that it requires a gradient already.
    """

    def __init__(self, record: Record) -> None:
        self.record, left_alone = record, record.left_alone
        seen = (operations for storage, operations in record.writes.items() if storage not in left_alone)
        self._always = {k for operations in seen for k in operations}.union(record.drawn)
        self._idle = record.idle
        self._last: tuple[tuple[int, int], list[_Row]] | None = None
        self._users = [by_user(pattern.function) for pattern in record.patterns.all]

    def of(self, first: int, end: int, there: Container[int], saves: Container[int] = ()) -> bytearray:
        """What to do with each of the operations ``first`` .. ``end`` - 1, of which the values ``there`` are there
        from the beginning, and what the operations ``saves`` have made themselves of what they save."""
        todo, needed = bytearray(end - first), set[int]()
        for row in self._rows(first, end):
            what = row.alone
            if what == RUN and row.k in saves:
                what = row.held
            for number in row.results:
                if number in needed and number not in there:
                    what = RUN
            if what != SKIP:
                todo[row.k - first] = what
                needed.update(row.arguments)
        return todo

    def _rows(self, first: int, end: int) -> list["_Row"]:
        """Last operation first; those of the stretch that was asked for last are remembered."""
        if self._last is None or self._last[0] != (first, end):
            rows = [self._row(k) for k in range(end - 1, first - 1, -1) if k not in self._idle]
            self._last = (first, end), rows
        return self._last[1]

    def _row(self, k: int) -> "_Row":
        record = self.record
        packs, given = record.packs[k], record.given[k]
        results = tuple(record.results_of(k))
        if k in self._always or self._users[record.calls[k]] or any(n >= 0 and record.birth[n] < k for n in results):
            alone = held = RUN
        elif not packs:
            alone = held = SKIP
        else:
            alone, held = (SAVE if given == packs else RUN), (SAVE if given else SKIP)
        return _Row(k, results, tuple(record.arguments_of(k)), alone, held)

    def asked(self, first: int, end: int, seconds: Sequence[float]) -> "Asked":
        """The same of one stretch to which what is there is added step by step; ``seconds`` of its operations."""
        return Asked(self._rows(first, end), dict(enumerate(seconds, first)))

    def may_be_held(self, k: int) -> bool:
        """Whether operation ``k`` need not compute where what it has made itself of what it saves is there."""
        record = self.record
        some = MIXED < record.given[k] < record.packs[k]
        return some and not (k in self._always or k in self._idle or self._users[record.calls[k]])


class Asked:
    """What has to run again of one stretch, as more and more is there: what that leaves unasked for is found by counts
    of who needs each value, from there on alone."""

    def __init__(self, rows: Sequence[_Row], seconds: Mapping[int, float]) -> None:
        self._rows, self._seconds = {row.k: row for row in rows}, seconds
        self._maker = {number: row.k for row in reversed(rows) for number in reversed(row.results)}
        self._there, self._saves = set[int](), set[int]()
        self._what, self._needed = dict[int, int](), Counter[int]()
        for row in rows:  # last one first
            self._what[row.k] = what = RUN if any(self._needed[n] for n in row.results) else row.alone
            if what != SKIP:
                self._needed.update(set(row.arguments))

    def saved_by(self, values: Iterable[int], operations: Iterable[int], *, there: bool = False) -> float:
        """Seconds that need not run again if ``values`` are there, too, and what ``operations`` have made themselves of
        what they save. ``there``: they are from now on."""
        values, saves = self._there.union(values), self._saves.union(operations)
        what, fewer, found = dict[int, int](), Counter[int](), 0.0
        ask = [self._maker[n] for n in values - self._there if n in self._maker] + [*(saves - self._saves)]
        while ask:
            k = ask.pop()
            row, before = self._rows[k], what.get(k, self._what[k])
            now = row.held if row.alone == RUN and k in saves else row.alone
            if any(self._needed[n] > fewer[n] and n not in values for n in row.results):
                now = RUN
            if now >= before:
                continue
            what[k] = now
            found += self._seconds[k] if before == RUN else 0.0
            if now == SKIP:
                for number in set(row.arguments):
                    fewer[number] += 1
                    if fewer[number] == self._needed[number] and number in self._maker:
                        ask.append(self._maker[number])
        if there:
            self._there, self._saves = values, saves
            self._what.update(what)
            self._needed.subtract(fewer)
        return found
