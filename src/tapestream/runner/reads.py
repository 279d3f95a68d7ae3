"""What the code of a stage reads beside modules: what functions have captured, and containers that are attributes."""

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapestream.capture.buffers import NUMBERS
from tapestream.capture.cells import Cell, among
from tapestream.capture.python_state import is_front_end, names_of
from tapestream.runner.captured import InTurn, cell_contents, globals_named

_CONTAINERS, _MOST = (dict, list, tuple), 64
_WRITING = frozenset(("append", "appendleft", "add", "update", "extend", "insert", "setdefault", "pop", "clear"))


@dataclass(frozen=True, slots=True)
class Reads:
    """A function, where its globals are, those that it names, and whether it may write into containers."""

    function: types.FunctionType
    given: tuple[Any, ...]
    names: tuple[str, ...]
    writes: bool

    def into(self, captured: list[Any], marks: list[Any], cells: Sequence[Cell]) -> None:
        """Add what it reads now, and of tensors that get no gradient and small containers what is in them."""
        first = len(captured)
        captured += self.given
        captured += cell_contents(self.function)
        captured += map(self.function.__globals__.get, self.names)
        for value in captured[first:]:
            kind = type(value)
            if kind in _CONTAINERS and not self.writes and len(value) <= _MOST:
                marks += marks_in(value, cells)
            elif isinstance(value, torch.Tensor):
                marks += _mark(value, cells)


def reads_of(function: Any) -> Iterator[Reads]:
    """Of a function, or of several that run in turn."""
    given: tuple[Any, ...] = ()
    if isinstance(function, InTurn):
        for one in function.functions:
            yield from reads_of(one)
        return
    while isinstance(function, (functools.partial, types.MethodType)):
        if isinstance(function, functools.partial):
            given, function = (*given, *function.args, *function.keywords.values()), function.func
        else:
            function = function.__func__
    if isinstance(function, types.FunctionType):
        yield Reads(function, given, globals_named(function.__code__), _may_write(function.__code__))


def marks_in(container: Any, cells: Sequence[Cell]) -> Iterator[Any]:
    """Of the numbers and tensors in a small container."""
    for one in container.values() if type(container) is dict else container:
        yield from _mark(one, cells)


def containers_read(module: nn.Module) -> Iterator[Any]:
    """Small containers that are attributes of a module or of its class and that its forward, or a method that it calls,
    names; none where these may write into containers."""
    if is_front_end(module):
        return
    kind, named, waiting = type(module), set[str](), [type(module).forward]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        if code is None or _may_write(code):
            return
        new = set(names_of(code)) - named
        named |= new
        waiting += [found for name in new if isinstance(found := getattr(kind, name, None), types.FunctionType)]
    for name in named:
        value: Any = vars(module).get(name, getattr(kind, name, None))
        if type(value) in _CONTAINERS and len(value) <= _MOST:
            yield value


def _mark(value: Any, cells: Sequence[Cell]) -> Iterator[Any]:
    if type(value) in NUMBERS:
        yield value
    elif isinstance(value, torch.Tensor) and not value.requires_grad:
        yield id(value), 0 if among(cells, value) else version_of(value)


@functools.lru_cache(1024)
def _may_write(code: types.CodeType) -> bool:
    """Whether a function may write into containers: where it counts, it says itself when to (`recomputing`)."""
    stores = any(one.opname == "STORE_SUBSCR" for one in dis.get_instructions(code))
    return stores or not _WRITING.isdisjoint(code.co_names)


def version_of(tensor: torch.Tensor) -> int:
    """Its version; -1 for one made in inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version
