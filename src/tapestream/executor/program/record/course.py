"""`Course`: the calls that a program makes, to know them again without noting them where all that is saved has room."""

import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy
import torch

from tapestream.executor.program.calls.patterns import attribute_of, constants_of, is_lasting, tensors_of
from tapestream.executor.program.calls.seams import Apply
from tapestream.executor.program.calls.users import is_custom
from tapestream.executor.program.calls.values import nbytes_of
from tapestream.executor.program.record.record import ALIVE, Record, look
from tapestream.runner.kernels import are_chosen

_MOST = 1 << 14  # operations of one that is held for the next call
_MARKS = 8
_ATTENDING = ("scaled_dot_product_attention", "multi_head_attention_forward")


@dataclass(frozen=True, slots=True)
class Closely:
    """``nbytes`` of the tensors that an operation is given, -1 where these do not matter; of attention and of
    users' code the ``constants``, and what chooses between ``kernels`` of the one, how many tensors the other ``saves``
    and how they look; else None. ``marked``: what it saves is heard by hooks."""

    nbytes: int = -1
    constants: Any = None
    kernels: tuple[Any, ...] | None = None
    saves: tuple[int, int] | None = None
    marked: bool = False

    def holds(self, args: Any, kwargs: Any) -> bool:
        """Whether it is given the like."""
        if self.constants is None:
            return self.nbytes < 0 or self.nbytes == nbytes_within((args, kwargs))
        tensors: list[torch.Tensor] = []
        if constants_of(args, kwargs, tensors) != self.constants:
            return False
        if self.kernels is not None and not are_chosen(self.kernels):
            return False
        return self.nbytes < 0 or self.nbytes == sum(map(nbytes_of, tensors))

    def is_like(self, saved: Sequence[torch.Tensor]) -> bool:
        """Whether users' code, which may do anything, has saved the like."""
        return (len(saved), functools.reduce(look, saved, 0)) == self.saves


@dataclass(frozen=True, slots=True)
class ApplyAgain:
    """Equal to the `Apply` of a class, which it does not keep alive."""

    cls: "weakref.ref[Any]"

    def __eq__(self, other: object) -> bool:
        return type(other) is Apply and other.cls is self.cls()

    def __hash__(self) -> int:
        return hash(self.cls)


class Expected(NamedTuple):
    """One call. ``function``: None after the last one. ``grad``: whether gradients are on; ``needs``: how many tensors
    with the need of one it is given, ``nbytes`` of what it gives, -1 where these are not known. ``closely``: of one
    that saves more than it gives, or by the kernel chosen, and of those that are marked: a few of the operations that
    save, first and last ones among them, and what users have written that saves elsewhere than by a context."""

    function: Any
    grad: bool = False
    needs: int = -1
    nbytes: int = -1
    closely: Closely | None = None


def nbytes_within(values: Any) -> int:
    """Bytes of all tensors in what a call is given, or gives."""
    return sum(map(nbytes_of, tensors_of(values, [])))


@dataclass(frozen=True, slots=True)
class Course:
    """The ``calls`` of a program, and `Expected` of nothing. ``asking``: functions of calls that made nothing.
    ``held_nbytes``: before each operation, and at the end, what plain autograd holds of the program: what it has saved,
    and what is alive."""

    calls: list[Expected]
    asking: frozenset[Any]
    held_nbytes: list[int]


def course_of(record: Record) -> Course | None:
    """None where a part of the program could not be noted by itself: calls that no function mode sees but those of
    autograd.Functions and custom operations, memory that others see, or that ``.data`` shows, needs of gradients that
    are switched, users' modes."""
    if not 0 < len(record) <= _MOST or record.spoilt or record.switched or record.handed_over:
        return None
    if Counter(record.untried) - Counter(record.hidden.keys()):  # their backward is users' code, which is never tried
        return None
    if any(ambient.modes or ambient.dispatching for ambient in record.ambients) or record.arrays.met:
        return None
    patterns = [record.patterns.all[call] for call in record.calls]
    if any(one.foreign or attribute_of(one.function) == "data" for one in patterns):
        return None
    functions: list[Any] = [one.function for one in patterns]
    for k, function in enumerate(functions):
        if not (type(function) is Apply or is_custom(function) if k in record.hidden else is_lasting(function)):
            return None
    known = _known_nbytes(record)
    nbytes = [_sum(record.results_of(k), known) for k in range(len(record))]
    heavy = numpy.flatnonzero(numpy.asarray(record.inner_nbytes) > numpy.maximum(nbytes, 0)).tolist()
    closely = {k: Closely(total) for k in heavy if (total := _sum(record.arguments_of(k), known)) >= 0}
    ambients = [record.ambients[number] for number in record.ambient]
    for k, (one, ambient) in enumerate(zip(patterns, ambients, strict=True)):
        if getattr(one.function, "__name__", "") in _ATTENDING:
            closely[k] = Closely(-1, one.key[1:], ambient.kernels)
        elif k in record.hidden:
            nbytes_given = _sum(record.arguments_of(k), known)
            closely[k] = Closely(nbytes_given, one.key[1:], saves=(record.packs[k], record.looks[k]))
    functions = [ApplyAgain(weakref.ref(f.cls)) if type(f) is Apply else f for f in functions]
    saving = numpy.flatnonzero(numpy.asarray(record.packs)).tolist()
    marked = {saving[i * (len(saving) - 1) // (_MARKS - 1)] for i in range(_MARKS) if saving}
    marked.update(k for k, hidden in record.hidden.items() if hidden.saved != record.packs[k])
    closely |= {k: replace(closely.get(k, Closely()), marked=True) for k in marked}
    grads, looked_at = [ambient.grad for ambient in ambients], [closely.get(k) for k in range(len(record))]
    calls = [Expected(*one) for one in zip(functions, grads, _needs(record), nbytes, looked_at, strict=True)]
    return Course([*calls, Expected(None)], frozenset(record.asking), _held_nbytes(record))


def _known_nbytes(record: Record) -> dict[int, int]:
    """By number, those of the values of which the record tells, and of external tensors."""
    found = {~k: nbytes_of(external.held) for k, external in enumerate(record.externals)}
    first = dict[int, int]()  # by storage, the value for which it was made
    for value, (storage, nbytes) in enumerate(zip(record.storage, record.cotangent_nbytes, strict=True)):
        own = first.setdefault(storage, value) == value and not record.storage_external[storage]
        if nbytes or own:
            found[value] = nbytes or record.storage_nbytes[storage]
    return found


def _needs(record: Record) -> list[int]:
    """Of each operation. What is written into may have got the need since it was made."""
    written, found = record.writes.keys(), dict[int, bool]()
    for k, external in enumerate(record.externals):
        if external.storage not in written:
            found[~k] = external.requires
    for value, (storage, nbytes) in enumerate(zip(record.storage, record.cotangent_nbytes, strict=True)):
        if value in record.gained:
            continue
        if nbytes or (storage not in written and record.storage_nbytes[storage]):
            found[value] = nbytes > 0
    given = ([found.get(number) for number in record.arguments_of(k)] for k in range(len(record)))
    return [-1 if None in needs else sum(map(bool, needs)) for needs in given]


def _sum(numbers: Iterable[int], known: Mapping[int, int]) -> int:
    """Of all of them, -1 where there is none or one is not known."""
    found = [known.get(number) for number in numbers]
    return -1 if None in found or not found else sum(filter(None, found))


def _held_nbytes(record: Record) -> list[int]:
    n, storage = len(record), numpy.asarray(record.storage)
    nbytes = numpy.where(numpy.asarray(record.storage_external), 0, numpy.asarray(record.storage_nbytes))
    start, stop = (numpy.full(len(nbytes), border) for border in (n + 1, -1))
    death = numpy.asarray(record.death)
    numpy.minimum.at(start, storage, numpy.asarray(record.birth) + 1)
    numpy.maximum.at(stop, storage, numpy.where(death == ALIVE, n, death))
    stop[numpy.unique(numpy.asarray(record.saves))] = n
    change = numpy.zeros(n + 2, dtype=numpy.int64)
    numpy.add.at(change, start, nbytes)
    there = start <= n
    numpy.add.at(change, stop[there] + 1, -nbytes[there])
    inner = numpy.concatenate(([0], numpy.cumsum(record.inner_nbytes)))
    found: list[int] = (numpy.cumsum(change)[: n + 1] + inner).tolist()
    return found


__all__ = ["Course", "course_of"]
