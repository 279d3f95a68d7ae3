"""Numbers that code reads from objects that are no modules, and from classes: settings, flags, schedules."""

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from tapestream.capture.buffers import NUMBERS
from tapestream.capture.python_state import FIXED, LISTS, SETS, attributes_of, held_by, is_of_library, walk


class Attribute(NamedTuple):
    """Where a number is, or an object that leads to one: an object or class, and the name there."""

    holder: Any
    name: str

    @property
    def owner(self) -> str:
        """The name of the class."""
        named = isinstance(self.holder, (type, types.ModuleType))
        return str((self.holder if named else type(self.holder)).__name__)

    def now(self) -> Any:
        """What is there now."""
        own = getattr(self.holder, "__dict__", {})
        return own[self.name] if self.name in own else getattr(self.holder, self.name, None)


class AttributesRead(NamedTuple):
    """``numbers``: where they are; ``objects``: where those are that lead there, and what these were."""

    numbers: tuple[Attribute, ...] = ()
    objects: tuple[tuple[Attribute, Any], ...] = ()

    @classmethod
    def of(cls, functions: Sequence[Any], modules: Sequence[nn.Module]) -> "AttributesRead":
        """Those that ``functions``, or functions and methods that these name, read and never write: what they write
        themselves is a count of theirs, which running them twice finds (`tapestream.planning.repeating`)."""
        held = [value for module in modules for value in attributes_of(module).values() if not isinstance(value, FIXED)]
        classes = dict.fromkeys(kind for m in modules for kind in type(m).__mro__ if not is_of_library(kind))
        found = [*walk([*functions, *held, *classes])]
        plain = [one for one in found if not isinstance(one, type) and _is_plain(one)]
        shown = {kind for one in plain for kind in type(one).__mro__}  # an object shows what its classes hold
        objects = [*plain, *(one for one in found if isinstance(one, type) and one not in shown)]
        if not any(map(_numbers_of, objects)):
            return cls()
        kinds = dict.fromkeys(kind for one in objects for kind in (one if isinstance(one, type) else type(one)).__mro__)
        calls = [vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind) and not is_of_library(kind)]
        named = [*functions, *calls, *(one for one in found if isinstance(one, types.FunctionType))]
        read, known = _names_read(named, [*kinds]), set(map(id, objects))
        numbers = [Attribute(one, name) for one in objects for name in _numbers_of(one) if name in read]
        leading = [(Attribute(one, name), value) for one in objects for name, value in held_by(one).items()
                   if id(value) in known and name in read]  # fmt: skip
        return cls(tuple(numbers), tuple(leading))

    def lead_elsewhere(self) -> bool:
        """Whether another object is where one was."""
        return any(place.now() is not value for place, value in self.objects)


def _numbers_of(value: Any) -> dict[str, Any]:
    """Of an object or class, what its classes hold for it among them."""
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    places = [*(vars(cls) for cls in reversed(classes) if not is_of_library(cls)), held_by(value)]
    return {name: one for place in places for name, one in place.items() if type(one) in NUMBERS}


def _is_plain(value: Any) -> bool:
    """Whether it is an object with attributes, or a module of Python's: `held_by` looks into no libraries."""
    return not isinstance(value, (*FIXED, *LISTS, *SETS, dict, nn.Module, types.FunctionType, types.MethodType))


def _names_read(functions: Sequence[Any], kinds: Sequence[type]) -> frozenset[str]:
    read, written, seen = set[str](), set[str](), set[types.CodeType]()
    waiting = [code for function in functions for code in _codes_of(function)]
    while waiting:
        code = waiting.pop()
        if code in seen:
            continue
        seen.add(code)
        names, stored = _names_of(code)
        read, written = read | names, written | stored
        methods = (vars(kind)[name] for kind in kinds for name in names if name in vars(kind))
        waiting += [code for method in methods for code in _codes_of(method)]
    return frozenset(read - written)


def _codes_of(function: Any) -> Iterator[types.CodeType]:
    while isinstance(function, (functools.partial, types.MethodType, property, staticmethod, classmethod)):
        if isinstance(function, property):
            function = function.fget
        else:
            function = function.func if isinstance(function, functools.partial) else function.__func__
    if isinstance(function, types.FunctionType):
        yield function.__code__


@functools.lru_cache(4096)
def _names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Attributes that code reads, or calls; and those that it writes; that of functions inside of it too."""
    read, written = set[str](), set[str]()
    for one in dis.get_instructions(code):
        if one.opname in ("STORE_ATTR", "DELETE_ATTR"):
            written.add(one.argval)
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            read.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names, stored = _names_of(inner)
            read, written = read | names, written | stored
    return frozenset(read), frozenset(written)
