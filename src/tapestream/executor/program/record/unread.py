"""What a program writes into and never reads: running statistics in training, counters of batches.

A replay need not bring back what such a buffer of others held, nor count into it again.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from tapestream.executor.program.calls.patterns import Pattern
from tapestream.executor.program.calls.templates import PLACE
from tapestream.executor.program.calls.users import by_user
from tapestream.executor.program.calls.writes import places_of_statistics, trains

if TYPE_CHECKING:
    from tapestream.executor.program.record.record import Record

_CONSTANTS = (type(None), bool, int, float)


class Unread(NamedTuple):
    """``storages`` of external tensors; ``idle``: operations that do nothing but write into those."""

    storages: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()


def unread_in(record: "Record") -> Unread:
    """Of a program that has ended."""
    shown = set(numpy.unique(numpy.asarray(record.storage)).tolist())
    found = {s for s in record.writes if record.storage_external[s] and s not in shown}
    if not found:
        return Unread()
    into: dict[int, set[int]] = {}
    for storage, operations in record.writes.items():
        for k in operations:
            into.setdefault(k, set()).add(storage)
    uses, drawn = _uses(record, found), set(record.drawn)
    only_write = {k for k in into if k not in drawn and _only_writes(record, k)}
    # Statistics are saved all the same, and backward has to say that something else has written into them.
    averaged = {storage for _, statistics, storage in uses if statistics}
    while True:
        idle = {k for k in only_write if into[k] <= found - averaged}
        read = {storage for k, statistics, storage in uses if not (statistics or k in idle)} & found
        if not read:
            return Unread(frozenset(found), frozenset(idle))
        found -= read


def _uses(record: "Record", storages: set[int]) -> list[tuple[int, bool, int]]:
    """Which operations are given them: operation, whether as statistics that it does not read, storage."""
    n, arguments = len(record), numpy.asarray(record.arguments)
    ends = numpy.asarray(record.argument_ends).astype(numpy.int64)
    counts = numpy.diff(ends, prepend=0)
    operations, places = numpy.repeat(numpy.arange(n), counts), numpy.arange(len(arguments))
    places = places - numpy.repeat(ends - counts, counts)
    external = numpy.array([one.storage for one in record.externals] or [-1])
    storage = numpy.where(arguments < 0, external[numpy.where(arguments < 0, -1 - arguments, 0)], -1)
    statistics = [_statistics(pattern) for pattern in record.patterns.all]
    at = numpy.flatnonzero(numpy.isin(storage, list(storages)))
    found = zip(operations[at].tolist(), places[at].tolist(), storage[at].tolist(), strict=True)
    return [(k, place in statistics[record.calls[k]], one) for k, place, one in found]


def _only_writes(record: "Record", k: int) -> bool:
    """Whether an operation leaves nothing behind but what it writes: no value, and nothing saved."""
    if record.packs[k] or record.inner_nbytes[k]:
        return False
    return not by_user(record.pattern(k).function) and all(number < 0 for number in record.results_of(k))


def _statistics(pattern: Pattern) -> frozenset[int]:
    """Which of the tensors of a normalisation in training are its running statistics, in their order."""
    known = places_of_statistics(pattern.function)
    if known is None or trains(pattern.args, pattern.kwargs) is not True:
        return frozenset()
    given: list[tuple[Any, Any]] = [*enumerate(pattern.args), *(pattern.kwargs or {}).items()]
    tensors = [place for place, one in given if type(one) not in _CONSTANTS]
    simple = all(one is PLACE or type(one) in _CONSTANTS for _, one in given)
    return frozenset(number for number, place in enumerate(tensors) if simple and place in known)
