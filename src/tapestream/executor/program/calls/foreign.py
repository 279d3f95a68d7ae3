"""Objects that calls are given: held without keeping a program alive, and compared with what they were."""

import contextlib
import functools
import types
import weakref
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

import numpy
import torch

from tapestream.errors import GradientError
from tapestream.executor.program.calls.arrays import BUFFERS
from tapestream.runner.captured import globals_named

PLAIN = (int, bool, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
         torch.memory_format, Enum)  # fmt: skip
_DEEPEST = 2  # objects in attributes of objects


class Foreign:
    """An object, equal to itself alone; held weakly where that is possible.

    What an operation is given may refer to values of the program. A record that held it would be held by it in turn,
    through a graph that no collector of cycles looks into; so the graph holds it (see `Foreign.keep_with`).
    """

    __slots__ = ("_hash", "_name", "_of", "_weak")

    def __init__(self, value: Any) -> None:
        self._of, self._weak, self._hash, self._name = value, False, id(value), type(value).__name__
        with contextlib.suppress(TypeError):
            self._of, self._weak = weakref.ref(value), True

    def __call__(self) -> Any:
        """The object. Raises GradientError when it is gone."""
        found = self._of() if self._weak else self._of
        if found is None:
            raise GradientError(
                f"Program: an operation has to run again, but an object of type {self._name} that it was given is "
                "gone; hold that object or the operation's result"
            )
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Foreign):
            return False
        mine, others = (one._of() if one._weak else one._of for one in (self, other))
        return mine is not None and mine is others

    def __hash__(self) -> int:
        return self._hash

    def keep_with(self, results: Sequence[torch.Tensor]) -> None:
        """Hold it as long as the graph of any of an operation's results; where these have none, as long as this is
        held."""
        nodes: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        if not nodes:
            self._of, self._weak = self(), False
        for node in dict.fromkeys(nodes) if self._weak else ():
            node.metadata.setdefault("tapestream", []).append(self())


def shown(value: Any, deep: int = 0) -> Any:
    """Equal for a value that has not been changed: tensors by version, containers and arrays by content, other objects
    by themselves, and those up to ``deep`` below by their attributes; functions by what they have captured, and by the
    global data that they name."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Foreign(value), value._version
    if isinstance(value, numpy.ndarray):
        return Foreign(value), blake2b(value.tobytes()).digest()
    if isinstance(value, dict):
        return type(value), tuple(
            (shown(key) if isinstance(key, PLAIN) else Foreign(key), shown(v, deep)) for key, v in value.items()
        )
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(shown(item, deep) for item in value)
    if isinstance(value, types.MethodType):
        return shown(value.__func__, deep), shown(value.__self__, deep)
    inside = None if deep <= 0 or isinstance(value, (type, types.ModuleType)) else _inside(value)
    return Foreign(value) if inside is None else (Foreign(value), shown(inside, deep - 1))


def shown_of(given: tuple[Foreign, ...]) -> Any:
    """What objects show that an operation is given."""
    try:
        return tuple(shown(one(), _DEEPEST) for one in given)
    except RecursionError:  # a container in itself: nothing is known of it
        return ()


def _inside(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell is not None]
        named = [_said_by(value.__globals__, name) for name in globals_named(value.__code__)]
        return [_content(cell) for cell in cells], named, value.__defaults__, value.__kwdefaults__, value.__dict__
    return getattr(value, "__dict__", None)


def _said_by(names: dict[str, Any], name: str) -> Any:
    """Of what is global, data alone: functions and modules that it holds do not change, and would lead far."""
    found = names.get(name)
    return found if isinstance(found, (*PLAIN, torch.Tensor, numpy.ndarray, dict, list, tuple, set)) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def has_objects(key: Any) -> bool:
    """Whether a key of a call (see `patterns`) has any in it."""
    return isinstance(key, Foreign) or (isinstance(key, tuple) and any(map(has_objects, key)))


def indexed(value: Any) -> Any:
    """``value`` with integers in place of objects that torch takes for them: they may be others later."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(indexed(item) for item in value)
    if kind is dict:
        return {name: indexed(item) for name, item in value.items()}
    if kind is slice:
        return slice(indexed(value.start), indexed(value.stop), indexed(value.step))
    known = isinstance(value, (*PLAIN, torch.Tensor, numpy.generic, *BUFFERS, torch.SymInt, torch.SymBool))
    if known or not hasattr(kind, "__index__") or hasattr(kind, "__members__"):  # which enumerations in C++ have
        return value
    return value.__index__()
