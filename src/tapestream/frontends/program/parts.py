"""Gradients that are parts of another one's memory: backward of ``cat`` and ``stack`` gives parts of its gradient."""

from typing import Any

import numpy
from numpy.typing import NDArray

from tapestream.executor.program.record.record import Record

Numbers = NDArray[Any]

_JOINING = frozenset(
    ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack", "column_stack")
)
_PASSING = frozenset(
    ("add", "__add__", "__radd__", "sub", "__sub__", "view", "view_as", "reshape", "flatten", "unflatten", "transpose",
     "permute", "movedim", "swapaxes", "t", "unsqueeze", "squeeze", "clone", "contiguous", "__get__", "to")
)  # fmt: skip
"""Functions whose backward hands on the memory that it is given."""


def parts(record: Record, birth: Numbers, arguments: Numbers, user: Numbers) -> tuple[dict[int, int], dict[int, int]]:
    """Two borders by value. Of one that joins others: down to which memory for the whole of its gradient is held, since
    parts of it wait for what made the others. Of these: from which down their gradients have memory of their own.

    ``arguments`` and ``user``: what operations are given, and which operation that is, in order. A part goes when a
    gradient from an earlier use is added to it; the last part, nobody else showing that memory any more, may have it
    added in place, and lives until its value was made.
    """
    whole, own = dict[int, int](), dict[int, int]()
    joining = _named(record, _JOINING)
    if not joining.any():
        return whole, own
    before, made_at = _uses_before(arguments, user), _made_at(record, birth)
    for k in numpy.flatnonzero(joining).tolist():
        made = [n for n in record.results_of(k) if n >= 0 and birth[n] == k]
        at = record.argument_ends[k - 1] if k else 0
        given = [(n, int(before[at + i])) for i, n in enumerate(record.arguments_of(k)) if n >= 0]
        given = [(n, use) for n, use in given if record.cotangent_nbytes[n]]
        if len(made) != 1 or not given:
            continue
        first, until = k, k + 1
        for number, use in given:
            replaced = use if use >= 0 else int(birth[number])
            if use >= 0:  # else what made it may have to copy the part
                own[number] = min(use, own.get(number, use))
            if replaced <= first:
                first, until = replaced, int(made_at[birth[number]]) + 1
        whole[made[0]] = until
    return whole, own


def _uses_before(arguments: Numbers, user: Numbers) -> Numbers:
    """At each place in ``arguments``, the operation that used the same value last before, -1 for none."""
    order = numpy.lexsort((numpy.arange(len(user)), arguments))
    same = arguments[order][1:] == arguments[order][:-1]
    found = numpy.full(len(user), -1)
    found[order[1:]] = numpy.where(same, user[order[:-1]], -1)
    return found


def _made_at(record: Record, birth: Numbers) -> Numbers:
    """By operation, the one whose backward uses up a gradient of its result, handing none of its memory on."""
    found = numpy.arange(len(record))
    for k in numpy.flatnonzero(_named(record, _PASSING)).tolist():
        given = [n for n in record.arguments_of(k) if n >= 0 and record.cotangent_nbytes[n]]
        found[k] = min((int(found[birth[n]]) for n in given), default=k)
    return found


def _named(record: Record, names: frozenset[str]) -> Numbers:
    """Which operations call a function of one of these names."""
    known = [getattr(pattern.function, "__name__", "") in names for pattern in record.patterns.all]
    found: Numbers = numpy.array(known, dtype=bool)[numpy.asarray(record.calls)]
    return found
