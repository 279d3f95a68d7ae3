"""What a program sets before it uses it: parameters that a layer initialises by its first batch.

From the last write on they stay as they are, so a replay finds them in place: it neither keeps copies nor writes again.
"""

from typing import TYPE_CHECKING, NamedTuple

from tapestream.executor.program.calls.users import by_user

if TYPE_CHECKING:
    from tapestream.executor.program.record.record import Record

_FORM = frozenset(
    ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like",
     "rand_like", "randn_like", "randint_like")
)  # fmt: skip
"""Operations that ask a tensor for its form and not for its numbers."""
_READS, _IDLE, _ASIDE = range(3)
_LOOKED_AT = 256  # operations between the first use of a leaf and a write into it


class Settled(NamedTuple):
    """``storages`` of leaves that require a gradient; ``idle``: operations that serve their writes alone; ``aside``:
    those among them that a replay makes into a copy, because they draw."""

    storages: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    aside: frozenset[int] = frozenset()


def settled_in(record: "Record", others: frozenset[int]) -> Settled:
    """Of a program that has ended; ``others``: storages that are never read."""
    leaves = {one.storage for one in record.externals if one.leaf and one.requires}
    found = {s for s in record.writes if s in leaves and record.storage_external[s]} - others
    while found:
        kinds = _kinds(record, found, others)
        early = {s for k, kind in enumerate(kinds) if kind == _READS for s in _touched(record, k, found)}
        if not early:
            idle, aside = (frozenset(k for k, kind in enumerate(kinds) if kind == which) for which in (_IDLE, _ASIDE))
            return Settled(frozenset(found), idle, aside)
        found -= early
    return Settled()


def asks_for_form(function: object) -> bool:
    """Whether a call reads no numbers of the tensor that it is given."""
    return getattr(function, "__name__", "") in _FORM


def _touched(record: "Record", k: int, found: set[int]) -> set[int]:
    """Which of ``found`` operation ``k`` uses before they have been written into for the last time."""
    if asks_for_form(record.pattern(k).function):
        return set()
    used = {record.storage_of(number) for number in (*record.arguments_of(k), *record.results_of(k))}
    return {s for s in used & found if record.writes[s][-1] >= k}


def _kinds(record: "Record", found: set[int], others: frozenset[int]) -> bytearray:
    """Of every operation. Last one first: what makes a value that only idle ones use is idle."""
    into: dict[int, set[int]] = {}
    for storage, operations in record.writes.items():
        for k in operations:
            into.setdefault(k, set()).add(storage)
    drawn, kinds = set(record.drawn), bytearray(len(record))
    used = bytearray(len(record.birth))  # by value, the least that its users are; `_ASIDE` + 1 for one of those
    for k in reversed(range(len(record))):
        kind = _kind(record, k, into.get(k, set()), found, others, k in drawn)
        made = [used[n] for n in record.results_of(k) if n >= 0 and record.birth[n] == k]
        if kind == _IDLE and made:
            kind = _READS if _READS + 1 in made else _ASIDE if _ASIDE + 1 in made else _IDLE
            inside = {record.storage_of(n) for n in record.arguments_of(k)} <= found
            if kind == _ASIDE and not inside:
                kind = _READS
        kinds[k] = kind
        for number in record.arguments_of(k):
            if number >= 0:
                used[number] = _worse(used[number], kind + 1)
    return kinds


def _worse(one: int, other: int) -> int:
    """Of two users: one that reads, else one that draws; 0 is none."""
    order = (0, 3, 1, 2)  # none, reads, idle, aside
    return one if order[one] >= order[other] else other


def _kind(record: "Record", k: int, into: set[int], found: set[int], others: frozenset[int], draws: bool) -> int:
    """By itself, whoever uses its results."""
    if record.packs[k] or record.inner_nbytes[k] or by_user(record.pattern(k).function):
        return _READS
    if not into <= found | others:
        return _READS
    if draws:
        return (
            _ASIDE if into and into <= found and all(_is_given(record, k, n) for n in record.results_of(k)) else _READS
        )
    return _IDLE


def _is_given(record: "Record", k: int, number: int) -> bool:
    return number < 0 or record.birth[number] < k


def sets_alone(record: "Record", storage: int, first: int) -> bool:
    """Whether operations from ``first`` on have only shown the memory of a leaf or written into it."""
    if len(record) - first > _LOOKED_AT:
        return False
    for k in range(first, len(record)):
        if storage not in {record.storage_of(n) for n in record.arguments_of(k)}:
            continue
        shows = all(record.storage_of(n) == storage for n in record.results_of(k))
        if record.packs[k] or not (shows or asks_for_form(record.pattern(k).function)):
            return False
    return True
