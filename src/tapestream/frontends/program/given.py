"""What a program is given: of what kind it is, and where."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.errors import InputError

_REMEMBERED = 16  # kinds of arguments
_LEAVES = frozenset((torch.Tensor, nn.Parameter, int, float, bool, str, type(None)))
"""Classes of what surely holds nothing else: most calls that take little time are given these alone."""


def kind_of(given: Any) -> tuple[Any, ...]:
    """Equal for arguments that plans may be shared by."""
    return tuple(
        (tuple(x.shape), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else x if type(x) is int else type(x)
        for x in _given(given)
    )


def device_of(given: Any) -> torch.device:
    """That of the first tensor, the CPU where there is none."""
    return next((x.device for x in _given(given) if isinstance(x, torch.Tensor)), torch.device("cpu"))


def _given(given: Any) -> Iterable[Any]:
    if type(given) is tuple and len(given) == 2:
        args, kwargs = given
        if type(args) is tuple and kwargs == {} and _LEAVES.issuperset(map(type, args)):
            return args
    return _leaves(given)


def _leaves(given: Any) -> Iterator[Any]:
    """What is in containers and dataclasses, the class of each of these first."""
    for leaf in pytree.tree_leaves(given):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield type(leaf)
            yield from _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            yield leaf


def remember(remembered: dict[Any, Any], kind: Any, value: Any) -> None:
    """Have ``value`` as the last of what is remembered by kinds of arguments, of which some are."""
    remembered.pop(kind, None)
    remembered[kind] = value
    if len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]


def check_function(function: Any) -> None:
    """Raise InputError for what a program cannot be."""
    if not callable(function):
        raise InputError(f"Program: a function or module is needed, found {type(function).__name__}")
    if runs_later(function):
        raise InputError(
            "Program: a generator function or coroutine runs after the call, when it is asked for more; give a "
            "function that returns tensors, in a list for example"
        )


def runs_later(function: Callable[..., Any]) -> bool:
    """Whether a call of it gives a generator or a coroutine."""
    called = function.forward if isinstance(function, nn.Module) else function
    return any(
        kind(one)
        for kind in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        for one in (called, getattr(called, "__call__", None))  # noqa: B004
    )
