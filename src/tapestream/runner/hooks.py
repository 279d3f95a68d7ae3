"""Hooks of modules: a recompute runs those that the first run had, whatever was registered or removed since."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

Held = Sequence[tuple[dict[Any, Any], dict[Any, Any]]]
"""Dictionaries of modules, each with what it is to hold."""


def hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Its dictionaries of hooks."""
    return (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip


def flags_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    """Which hooks take arguments by name, and which are always called: it says so in dictionaries beside those."""
    return (
        module._forward_hooks_with_kwargs, module._forward_hooks_always_called, module._forward_pre_hooks_with_kwargs
    )  # fmt: skip


def backward_hooks_off(modules: Iterable[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Inside, hooks on modules' backwards do nothing: they are for gradients, not for what is run to be timed, as often
    as that takes."""
    places = [place for module in modules for place in (module._backward_hooks, module._backward_pre_hooks) if place]
    return holding([(place, dict.fromkeys(place, _nothing)) for place in places])


def _nothing(*_: Any) -> None:
    """In the place of a hook, so that the graph is the same."""


@contextlib.contextmanager
def holding(held: Held) -> Iterator[None]:
    """Inside, the dictionaries hold what they are to hold; afterwards what they held before."""
    before = [(place, dict(place)) for place, _ in held]
    try:
        _fill(held)
        yield
    finally:
        _fill(before)


def _fill(held: Held) -> None:
    for place, wanted in held:
        place.clear()
        place.update(wanted)
