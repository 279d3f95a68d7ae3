"""What is the same in many calls: the function, the structure of its arguments, and the constants among them."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from tapestream.errors import InputError
from tapestream.executor.program.foreign import Foreign
from tapestream.executor.program.seams import Apply
from tapestream.executor.program.whole import Whole


class _Place:
    """Where a tensor goes."""


PLACE = _Place()
_ATOMS = frozenset(
    (int, bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
     torch.memory_format)
)  # fmt: skip

_MOST = 1 << 16  # kinds that are remembered


@dataclass(frozen=True, slots=True)
class Pattern:
    """One call without its tensors. ``kind`` is equal for calls that differ in constants alone. ``key``: equal for
    equal calls; ``foreign``: the objects that it is given."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    kind: int
    key: Any
    foreign: tuple[Foreign, ...]

    def call(self, tensors: Iterator[torch.Tensor]) -> Any:
        """The very same call, on ``tensors``."""
        args = [next(tensors) if a is PLACE else _filled(a, tensors) for a in self.args]
        if self.kwargs:
            return self.function(*args, **{name: _filled(value, tensors) for name, value in self.kwargs.items()})
        return self.function(*args)


@dataclass(frozen=True, slots=True)
class _Held:
    """An argument that is a container, taken apart; or one to be copied whenever it is used (an array)."""

    kind: Any
    items: tuple[Any, ...]
    keys: tuple[Any, ...] = ()


@dataclass(slots=True)
class Kinds:
    """Numbers of kinds, the same for all calls of a program. By kind and tensors' shapes, dtypes and need of gradients,
    ``transient_nbytes``: what a call takes while it runs beside what it leaves, ``reverse_nbytes``: what its backward
    takes beside the gradients that it gives, ``taken_nbytes``: what the last such call took and left."""

    numbers: dict[Any, int] = field(default_factory=dict)
    transient_nbytes: dict[Any, int] = field(default_factory=dict)
    reverse_nbytes: dict[Any, int] = field(default_factory=dict)
    taken_nbytes: dict[Any, int] = field(default_factory=dict)

    first: int = 0

    def number(self, key: Any) -> int:
        """That of ``key``, a new one if it was never seen."""
        return self.numbers.setdefault(key, self.first + len(self.numbers))

    def copy(self) -> "Kinds":
        """The same, to go on by itself."""
        return Kinds(
            dict(self.numbers),
            dict(self.transient_nbytes),
            dict(self.reverse_nbytes),
            dict(self.taken_nbytes),
            self.first,
        )

    def trim(self) -> None:
        """Begin anew where there are too many (of shapes that never come again, say); no number comes twice."""
        if len(self.numbers) + len(self.taken_nbytes) > _MOST:
            self.first += len(self.numbers)
            for known in (self.numbers, self.transient_nbytes, self.reverse_nbytes, self.taken_nbytes):
                known.clear()


class Patterns:
    """The patterns of one record, each held once."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.all = kinds, list[Pattern]()
        self._numbers: dict[Any, int] = {}

    def of(self, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Pattern:
        """The call's pattern, as it is before the call; its tensors are added to ``tensors`` in order.

        Raises InputError for arguments that a replay could not give again.
        """
        key = (function, tuple([_key(a, tensors) for a in args]), _key(kwargs, tensors) if kwargs else None)
        found = self._numbers.get(key)
        if found is not None:
            return self.all[found]
        kind, foreign = self.kinds.number(_without_constants((_kind_of(function), *key[1:]))), list[Foreign]()
        kept = {name: _template(value, foreign) for name, value in kwargs.items()} if kwargs else None
        return Pattern(function, tuple(_template(a, foreign) for a in args), kept, kind, key, tuple(foreign))

    def number(self, pattern: Pattern, results: Sequence[torch.Tensor]) -> int:
        """That of the pattern of a call that is recorded, whose objects live as long as the graph of its results."""
        for one in pattern.foreign:
            one.keep_with(results)
        found = self._numbers.get(pattern.key)
        if found is None:
            found = self._numbers[pattern.key] = len(self.all)
            self.all.append(pattern)
        return found


def tensors_of(result: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call's result in a fixed order, added to ``found``."""
    if isinstance(result, torch.Tensor):
        found.append(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            tensors_of(item, found)
    elif isinstance(result, dict):
        for item in result.values():
            tensors_of(item, found)
    return found


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return kind, value  # with its type, since 1 == 1.0 == True
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return PLACE
    if kind is float:
        return kind, value, math.copysign(1.0, value)
    if isinstance(value, (tuple, list)):
        return kind, tuple([_key(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(name, _key(item, tensors)) for name, item in value.items()])
    if kind is slice:
        return kind, tuple([_key(item, tensors) for item in (value.start, value.stop, value.step)])
    if isinstance(value, torch.Generator):
        raise InputError(
            "Program: an operation draws from a torch.Generator of its own, whose state is not kept; draw from torch's "
            "global generator (leave generator= out)"
        )
    if isinstance(value, numpy.ndarray):
        return _Place, kind, object()  # may be written into later: a copy of its own each time
    return _Place, kind, Foreign(value)


def _template(value: Any, foreign: list[Foreign]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return PLACE
    if isinstance(value, (tuple, list)):
        return _Held(kind, tuple(_template(item, foreign) for item in value))
    if kind is dict:
        return _Held(kind, tuple(_template(item, foreign) for item in value.values()), tuple(value))
    if kind is slice:
        return _Held(kind, tuple(_template(item, foreign) for item in (value.start, value.stop, value.step)))
    if isinstance(value, numpy.ndarray):
        return _Held(numpy.ndarray, (numpy.array(value),))
    if kind in _ATOMS or kind is float:
        return value
    foreign.append(Foreign(value))
    return foreign[-1]


def _filled(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if template is PLACE:
        return next(tensors)
    if type(template) is Foreign:
        return template()
    if type(template) is not _Held:
        return template
    kind = template.kind
    if kind is numpy.ndarray:
        return template.items[0].copy()
    items = [_filled(item, tensors) for item in template.items]
    if kind is list:
        return items
    if kind is dict:
        return dict(zip(template.keys, items, strict=True))
    if kind is slice:
        return slice(*items)
    if issubclass(kind, tuple) and getattr(kind, "_fields", None) is not None:
        return kind(*items)
    return kind(items)


def _without_constants(key: Any) -> Any:
    """``key`` with types in place of numbers."""
    if not isinstance(key, tuple):
        return key
    if len(key) >= 2 and key[0] in (int, float, complex):
        return key[0]
    if len(key) == 3 and key[0] is _Place:
        return key[1].__module__, key[1].__qualname__
    return tuple([_without_constants(item) for item in key])


def _kind_of(function: Any) -> Any:
    """What tells a function from others, without holding a class or module that the program itself has made."""
    if isinstance(function, Apply):
        return Apply, function.cls.__module__, function.cls.__qualname__
    return weakref.ref(function.module) if isinstance(function, Whole) else function
