"""What is the same in many calls: the function, the structure of its arguments, and the constants among them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from tapestream.errors import InputError


class _Place:
    """Where a tensor goes."""


PLACE = _Place()
_ATOMS = frozenset(
    (int, bool, str, bytes, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
     torch.memory_format)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """One call without its tensors. ``kind`` is equal for calls that differ in constants alone."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    kind: int

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

    def number(self, key: Any) -> int:
        """That of ``key``, a new one if it was never seen."""
        return self.numbers.setdefault(key, len(self.numbers))


class Patterns:
    """The patterns of one record, each held once."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds, self.all = kinds, list[Pattern]()
        self._numbers: dict[Any, int] = {}

    def number(self, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> int:
        """The pattern's number; the call's tensors are added to ``tensors`` in order.

        Raises InputError for arguments that a replay could not give again.
        """
        key = (function, tuple([_key(a, tensors) for a in args]), _key(kwargs, tensors) if kwargs else None)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.all)
            kind = self.kinds.number(_without_constants(key))
            kept = {name: _template(value) for name, value in kwargs.items()} if kwargs else None
            self.all.append(Pattern(function, tuple(_template(a) for a in args), kept, kind))
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
    return _Place, kind, id(value)  # held by the pattern, so the id stays its own


def _template(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return PLACE
    if isinstance(value, (tuple, list)):
        return _Held(kind, tuple(_template(item) for item in value))
    if kind is dict:
        return _Held(kind, tuple(_template(item) for item in value.values()), tuple(value))
    if kind is slice:
        return _Held(kind, tuple(_template(item) for item in (value.start, value.stop, value.step)))
    if isinstance(value, numpy.ndarray):
        return _Held(numpy.ndarray, (numpy.array(value),))
    return value


def _filled(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if template is PLACE:
        return next(tensors)
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
        return key[1]
    return tuple([_without_constants(item) for item in key])
