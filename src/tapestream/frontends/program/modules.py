"""The modules that a function calls, as far as they can be found without calling it, and which of them are blocks."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.executor.program.noting.taken import TakingWhole
from tapestream.executor.program.record.last import Place
from tapestream.frontends.module.blocks import repeated_children

Opaque: TypeAlias = type[nn.Module] | nn.Module | Iterable[type[nn.Module] | nn.Module] | Literal["auto"]

_DEEPEST = 4  # functions named in functions; libraries begin soon
_LONGEST = 4096  # items of a container that may be modules


def taking_whole(function: Callable[..., Any], opaque: Opaque) -> TakingWhole:
    """``function`` with modules taken as one operation each: those in ``opaque``, with "auto" its repeated blocks, and
    those that are compiled. Raises InputError for anything else in ``opaque``."""
    if isinstance(opaque, str) and opaque != "auto":
        raise InputError(f'Program: opaque is "auto", or holds modules and classes of modules, not {opaque!r}')
    if opaque == "auto":
        return TakingWhole(function, compiled_in(function), repeated_in(function))
    named = (opaque,) if isinstance(opaque, (type, nn.Module)) or not isinstance(opaque, Iterable) else opaque
    return TakingWhole(function, (*named, *compiled_in(function)))


def repeated_in(function: Callable[..., Any]) -> list[nn.Module]:
    """The repeated blocks of the modules that ``function`` calls, as ``ts.stream`` finds them."""
    return list(dict.fromkeys(block for module in _modules_of(function) for block in repeated_children(module)))


def compiled_in(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``function`` calls and that ``module.compile()`` has compiled in place."""
    parts = (part for module in _modules_of(function) for part in module.modules())
    return [part for part in parts if part._compiled_call_impl is not None]


def places_in(function: Callable[..., Any]) -> dict[int, Place]:
    """Where the modules that ``function`` calls have their parameters and buffers, by the ids of these."""
    found: dict[int, Place] = {}
    for part in (part for module in _modules_of(function) for part in module.modules()):
        for which in ("_parameters", "_buffers"):
            held = vars(part).get(which, {})  # a scripted module has none
            found |= {id(t): (weakref.ref(part), which, name) for name, t in held.items() if t is not None}
    return found


def _modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Those that ``function`` is, is a method of, closes over, has as default, names as global, or holds there in lists
    and dictionaries: the outermost ones, each once."""
    found = list(dict.fromkeys(_reached(function, set(), 0)))
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _reached(value: Any, seen: set[int], depth: int) -> Iterator[nn.Module]:
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
    else:
        for one in _inside(value):
            yield from _reached(one, seen, depth + 1)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isfunction(value):
        found = [value.__globals__.get(name) for name in value.__code__.co_names]
        found += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # not set yet
                found.append(cell.cell_contents)
        return found
    if isinstance(value, (list, tuple)):
        return list(value[:_LONGEST])
    if type(value) is dict:
        return list(value.values())[:_LONGEST]
    if inspect.isclass(value) or inspect.ismodule(value) or isinstance(value, torch.Tensor):
        return []
    held = getattr(value, "__dict__", None)
    return list(held.values()) if type(held) is dict else []
