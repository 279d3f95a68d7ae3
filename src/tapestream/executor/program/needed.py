"""Which operations of a stretch have to run again for what the stretch saves, given values that are there already."""

from collections.abc import Container

from tapestream.executor.program.record import Record
from tapestream.executor.program.seams import Apply
from tapestream.executor.program.whole import Whole

SKIP, SAVE, RUN = range(3)
"""What to do with an operation: nothing, call it until it has saved all that it did at first, or call it."""


class Needed:
    """Of the operations of ``record``.

    An operation that saves nothing but what it is given has saved that before it computes: it is called until then, if
    nobody needs its results. One that writes, draws, or is what users have written always runs: a later write tells
    that what was saved has changed, and draws come in their order. Not so where nothing reads what it writes into (see
    `Unread`).
    """

    def __init__(self, record: Record) -> None:
        self.record, unread = record, record.unread
        seen = (operations for storage, operations in record.writes.items() if storage not in unread.storages)
        self._always = {k for operations in seen for k in operations}.union(record.drawn)
        self._idle = unread.idle
        self._users = [isinstance(pattern.function, (Apply, Whole)) for pattern in record.patterns.all]

    def of(self, first: int, end: int, there: Container[int]) -> bytearray:
        """What to do with each of the operations ``first`` .. ``end`` - 1, of which the values ``there`` are there
        from the beginning."""
        record, todo, needed = self.record, bytearray(end - first), set[int]()
        for k in range(end - 1, first - 1, -1):
            if k in self._idle:
                continue
            wanted = any(n in needed and n not in there for n in record.results_of(k))
            if wanted or k in self._always or self._users[record.calls[k]]:
                todo[k - first] = RUN
            elif record.packs[k]:
                todo[k - first] = SAVE if self._saves_given(k) else RUN
            else:
                continue
            needed.update(record.arguments_of(k))
        return todo

    def _saves_given(self, k: int) -> bool:
        record = self.record
        if record.inner_nbytes[k]:
            return False
        saves = record.saves[record.save_ends[k - 1] if k else 0 : record.save_ends[k]]
        made = {record.storage[number] for number in record.results_of(k) if number >= 0}
        return made.isdisjoint(saves)
