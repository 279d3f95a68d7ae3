"""What a stage reads beside its input, and which nobody may change between a call and its backward: a recompute would
see the new one."""

import dis
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as every

from tapestream.errors import GradientError
from tapestream.runner.buffers import NUMBERS, Slot
from tapestream.runner.stage import cell_contents, globals_named

_EVERY_HOOKS = (every._global_forward_hooks, every._global_forward_pre_hooks, every._global_backward_hooks,
                every._global_backward_pre_hooks)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS, _MOST = (dict, list, tuple), 64
_WRITING = frozenset(("append", "appendleft", "add", "update", "extend", "insert", "setdefault", "pop", "clear"))


class Look(NamedTuple):
    """Of one module: its numbers and flags (``training`` is one), the modules below and parameters, hooks, the versions
    of what it has that gets no gradient (buffers, frozen parameters), and what its ``forward`` has captured."""

    numbers: dict[str, Any]
    inside: list[int]
    hooks: list[int]
    versions: list[int]
    captured: list[Any]


Looks = tuple[list[Look], list[Any]]


def looks_of(function: Any, modules: Sequence[nn.Module], written: Sequence[Slot]) -> Looks:
    """What the stage ``function`` with these modules sees now. ``written``: what it writes into itself, which
    recomputes get back in another way (see `BufferSnapshot`)."""
    own = {(id(module), name) for module, name in written}
    found = [_look(module, own) for module in modules]
    around = [hook for hooks in _EVERY_HOOKS for hook in hooks]
    return found, [around, *_captured(function)]


def check_looks(name: str, then: Looks, now: Looks, modules: Sequence[nn.Module]) -> None:
    """Raise GradientError with the name of what is another now."""
    if then == now:
        return
    for module, old, new in zip(modules, then[0], now[0], strict=False):
        if old != new:
            what = f"{_changed(old, new)} of a {type(module).__name__}"
            break
    else:
        what = "a value or tensor that it has captured, or a hook on all modules"
    raise GradientError(
        f"{name}: {what} was changed between the call and its backward, so that recomputing would give other values; "
        "run backward first, or set back what was changed"
    )


def _look(module: nn.Module, own: set[tuple[int, str]]) -> Look:
    key = id(module)
    numbers = {name: value for name, value in vars(module).items() if type(value) in NUMBERS and (key, name) not in own}
    hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks, *module._backward_pre_hooks]
    still = [b for name, b in module._buffers.items() if b is not None and (key, name) not in own]
    still += [p for p in module._parameters.values() if p is not None and not p.requires_grad]
    inside = [id(one) for one in (*module._modules.values(), *module._parameters.values())]
    forward = type(module).forward
    captured = [] if str(forward.__module__).startswith("torch.") else [*_captured(forward)]
    for value in vars(module).values():
        if type(value) in _FUNCTIONS:
            captured += _captured(value)
    return Look(numbers, inside, hooks, [_version(t) for t in still], captured)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _captured(function: Any) -> Iterator[Any]:
    """Numbers, and the versions of tensors that get no gradient, which a function closes over or names as globals."""
    given: tuple[Any, ...] = ()
    while isinstance(function, (functools.partial, types.MethodType)):
        if isinstance(function, functools.partial):
            given, function = (*given, *function.args, *function.keywords.values()), function.func
        else:
            function = function.__func__
    if not isinstance(function, types.FunctionType):
        return
    writes = _may_write(function.__code__)
    named = [function.__globals__.get(name) for name in globals_named(function.__code__)]
    for value in (*given, *cell_contents(function), *named):
        if type(value) in _CONTAINERS and not writes and len(value) <= _MOST:
            for one in value.values() if type(value) is dict else value:
                yield from _mark(one)
        else:
            yield from _mark(value)


def _mark(value: Any) -> Iterator[Any]:
    if type(value) in NUMBERS:
        yield value
    elif isinstance(value, torch.Tensor) and not value.requires_grad:
        yield id(value), _version(value)


@functools.lru_cache(1024)
def _may_write(code: types.CodeType) -> bool:
    """Whether a function may write into containers: where it counts, it says itself when to (`recomputing`)."""
    stores = any(one.opname == "STORE_SUBSCR" for one in dis.get_instructions(code))
    return stores or not _WRITING.isdisjoint(code.co_names)


def _changed(old: Look, new: Look) -> str:
    for name, value in old.numbers.items():
        if new.numbers.get(name, _changed) != value:
            return f"{name!r}"
    if old.inside != new.inside:
        return "a module or parameter"
    if old.captured != new.captured:
        return "a value that the forward function of a class has captured,"
    return "a hook" if old.hooks != new.hooks else "a buffer or frozen parameter"
