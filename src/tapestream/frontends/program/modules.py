"""The modules that a function calls, as far as they can be found without calling it, and which of them are blocks."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from torch import nn

from tapestream.capture.python_state import walk
from tapestream.errors import InputError
from tapestream.executor.program.noting.taken import TakingWhole
from tapestream.executor.program.record.last import Place
from tapestream.frontends.module.blocks import repeated_children

Opaque: TypeAlias = type[nn.Module] | nn.Module | Iterable[type[nn.Module] | nn.Module] | Literal["auto"]


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
    """The outermost modules that ``function`` reaches, each once."""
    found = [one for one in walk([function]) if isinstance(one, nn.Module)]
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]
