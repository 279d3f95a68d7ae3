"""What Python code reaches: the one walk through functions, objects and containers.

It sees closures, defaults, globals that code names, attributes, slots, classes, containers, weak references, context
variables, thread-local variables and what a suspended generator holds. It does not look into libraries, nor into
objects of extensions. What it cannot see, watching a run does (`tapestream.capture.observe`).
"""

import functools
import inspect
import io
import logging
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
"""Random generators that are objects."""
LISTS, SETS = (list, tuple, deque), (set, frozenset)
FIXED = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.Tensor)
_OF_LIBRARIES = ("tapestream.", "torch.")
_NONE_OF_ITS = (logging.Logger, io.IOBase)
"""No result depends on what these log, count or hold."""
_LEFT_ALONE, _HOLD_NOTHING = (*FIXED, nn.Module, *_NONE_OF_ITS), frozenset(FIXED)
_DEEPEST, _MOST, _LONGEST = 8, 100_000, 10_000


def key_of_generator(generator: Any) -> int:
    """Equal for objects that are one generator: PyTorch hands operations another object each time."""
    return int(getattr(generator, "_cdata", 0)) or id(generator)


def is_front_end(value: Any) -> bool:
    """Whether it is one of ours, with plans and counts of its own, and functions that users gave."""
    return hasattr(type(value), "user_functions") and str(type(value).__module__).startswith("tapestream.")


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Its attributes; of a front end, whose own they are, what users gave it."""
    return dict(held_by(module)) if is_front_end(module) else vars(module)


def held_by(value: Any) -> Mapping[Any, Any]:
    """What ``value`` leads to, by key; nothing for tensors, modules of PyTorch, libraries and what holds nothing."""
    if type(value) in _HOLD_NOTHING:  # most of what code reaches, and cheaper to see than by all its bases
        return {}
    if is_front_end(value):
        return dict(enumerate(value.user_functions))
    if isinstance(value, _LEFT_ALONE):
        return {}
    for kind, held in _KINDS.items():
        if isinstance(value, kind):
            return held(value)
    if str(type(value).__module__).startswith(_OF_LIBRARIES) or inspect.isbuiltin(value):
        return {}
    slots = (name for cls in type(value).__mro__ for name in _slots_of(cls) if hasattr(value, name))
    own = {**{name: getattr(value, name) for name in slots}, **(getattr(value, "__dict__", None) or {})}
    return own if is_of_library(type(value)) else {**own, ("class", ""): type(value)}


def walk(roots: Sequence[Any]) -> Iterator[Any]:
    """All that ``roots`` lead to, they first, each once: nearest first, a few objects deep. Of modules of PyTorch,
    themselves alone."""
    seen, level = set[int](), list(roots)
    for _ in range(_DEEPEST):
        following: list[Any] = []
        for value in level:
            if id(value) not in seen and len(seen) < _MOST:
                seen.add(id(value))
                yield value
                held = held_by(value)
                following += held.values() if len(held) <= _LONGEST else ()
        level = following


def modules_behind(function: Callable[..., Any]) -> list[nn.Module]:
    """Modules that are likely to be a part of ``function``, those below them among them, each once: itself, and what it
    closes over, has as default, is bound to or names as global, in containers too. Not those that lie deeper in other
    objects, of which it may use none."""
    found, seen, waiting = dict[nn.Module, None](), set[int](), [function]
    for item in waiting:
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found |= dict.fromkeys(item.modules())
        elif isinstance(item, types.FunctionType):
            held = held_by(item)
            waiting += (one for key, one in held.items() if not isinstance(key, str) or isinstance(one, nn.Module))
        elif isinstance(item, (functools.partial, types.CellType, *LISTS, dict)):
            waiting += held_by(item).values()
        elif isinstance(item, types.MethodType):
            waiting += (item.__func__, *_attributes_of(item.__self__))
        elif callable(item) and not isinstance(item, type) and not inspect.isbuiltin(item):
            waiting += _attributes_of(item)
    return list(found)


def _attributes_of(value: Any) -> list[Any]:
    return [value] if isinstance(value, nn.Module) else list(getattr(value, "__dict__", {}).values())


def things_behind(function: Callable[..., Any], kinds: tuple[type, ...]) -> list[Any]:
    """Objects of ``kinds`` that ``function`` reaches, by way of parameters and attributes of modules too, each once."""
    reached = list(walk([function]))
    modules = (below for one in reached if isinstance(one, nn.Module) for below in one.modules())
    places = (place for m in dict.fromkeys(modules) for place in (m._parameters, attributes_of(m)))
    if roots := [value for place in places for value in place.values()]:
        reached = list(walk([function, *roots]))
    return list({id(one): one for one in reached if isinstance(one, kinds)}.values())


def containers_behind(functions: Sequence[Any]) -> list[Any]:
    """Dictionaries, lists and sets that ``functions`` reach, each once."""
    found = (one for function in functions for one in things_behind(function, (dict, list, set)))
    return list({id(one): one for one in found}.values())


@functools.lru_cache(4096)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that code names, that of functions and comprehensions inside of it too."""
    inner = (name for one in code.co_consts if isinstance(one, types.CodeType) for name in names_of(one))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


# -- one step, by kind --------------------------------------------------------------------------------------------


def _of_function(function: types.FunctionType) -> dict[Any, Any]:
    """Cells, defaults, attributes; and of the globals that its code names what is no library's."""
    known = function.__globals__
    named = {name: known[name] for name in names_of(function.__code__) if name in known}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {
        **{name: value for name, value in named.items() if _may_be_its(function, value)},
        **{(name, "closed over"): cell for name, cell in cells if name != "__class__"},
        **dict(enumerate(function.__defaults__ or ())),
        **{(name, "default"): value for name, value in (function.__kwdefaults__ or {}).items()},
        **{(name, "attribute"): value for name, value in vars(function).items()},
    }


def _may_be_its(function: types.FunctionType, value: Any) -> bool:
    """Of what a library names, data alone: its functions lead everywhere."""
    if is_of_library(function):
        return isinstance(value, (*FIXED, *LISTS, *SETS, dict, nn.Module, numpy.ndarray, *GENERATORS))
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__ or not is_of_library(value)
    return not isinstance(value, type) and not (isinstance(value, types.ModuleType) and is_of_library(value))


def _of_cell(cell: types.CellType) -> dict[Any, Any]:
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # not filled yet
        return {}


def _of_class(cls: type) -> dict[Any, Any]:
    """Data among its attributes and those of its bases."""
    if is_of_library(cls):
        return {}
    own = {name: value for name, value in _named(cls).items() if not hasattr(type(value), "__get__")}
    return {**own, **{("base", base.__qualname__): base for base in cls.__bases__ if not is_of_library(base)}}


def _of_module(module: types.ModuleType) -> dict[Any, Any]:
    """Data among its names."""
    own = {} if is_of_library(module) else _named(module)
    return {name: value for name, value in own.items() if not isinstance(value, types.ModuleType)}


def _named(owner: type | types.ModuleType) -> dict[Any, Any]:
    """What a class or module has by name, without code."""
    own = {name: value for name, value in vars(owner).items() if not name.startswith("__")}
    code = (types.FunctionType, types.BuiltinFunctionType, type)
    return {name: value for name, value in own.items() if not isinstance(value, code)}


def _of_generator(generator: "types.GeneratorType[Any, Any, Any]") -> dict[Any, Any]:
    return {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals)


def _of_variable(variable: ContextVar[Any]) -> dict[Any, Any]:
    return {"value": variable.get(None)}


def _of_partial(partial: functools.partial[Any]) -> dict[Any, Any]:
    attributes = {(name, "attribute"): value for name, value in vars(partial).items()}
    return {"func": partial.func, **dict(enumerate(partial.args)), **partial.keywords, **attributes}


def _itself(value: dict[Any, Any]) -> dict[Any, Any]:
    return value


_KINDS: dict[Any, Callable[[Any], Mapping[Any, Any]]] = {
    dict: _itself,
    LISTS: lambda value: dict(enumerate(value)),
    SETS: lambda value: {one: one for one in value},
    functools.partial: _of_partial,
    types.MethodType: lambda value: {"__func__": value.__func__, "__self__": value.__self__},
    types.FunctionType: _of_function,
    types.CellType: _of_cell,
    weakref.ref: lambda value: {"()": value()},
    ContextVar: _of_variable,
    types.GeneratorType: _of_generator,
    types.ModuleType: _of_module,
    type: _of_class,
}


def _slots_of(cls: type) -> Sequence[str]:
    slots = vars(cls).get("__slots__", ())
    return [name for name in ((slots,) if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]


def is_of_library(value: Any) -> bool:
    """Whether a class, function or module is installed, rather than the user's own."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return name is not None and _is_installed(str(name).partition(".")[0])


@functools.lru_cache(4096)
def _is_installed(package: str) -> bool:
    if package in sys.stdlib_module_names or package in ("torch", "numpy", "tapestream"):
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and "site-packages" in Path(file).parts
