"""Forward hooks inside a block: what they are shown leaves the block as outputs of its node, with their gradients."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.capture.python_state import containers_behind
from tapestream.errors import InputError
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Guard
from tapestream.runner.private import refill, tensors_in
from tapestream.runner.state import State, storages, take_apart

_KEY = -1  # no handle of a registered hook is negative


class ReplacedOutput(InputError):
    """A forward hook inside a block returns another output."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One call of a module with hooks: what they are to be shown once the block's node exists."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: State  # without its tensors


@dataclass(slots=True)
class Captured:
    """What the hooked modules of one run put out. ``tensors``: of all of them, in order."""

    shown: list[Shown] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def show(
        self, tensors: Sequence[torch.Tensor], outer: dict[int, torch.Tensor], name: str, own: Sequence[torch.Tensor]
    ) -> None:
        """Call the hooks, with ``tensors`` in place of those captured, and among a module's arguments the caller's
        tensors (``outer``, by the ``id`` of the block's own) in place of the block's. ``own``: what the block returns.

        Raises ReplacedOutput when a hook wants to replace an output: the rest of the block has run without it, and
        InputError where it asks for the gradient of one from inside the block.
        """
        whole = set(map(id, own))
        start = 0
        for one in self.shown:
            n = len(one.output.requires)
            output = one.output.tree(tensors[start : start + n])
            start += n
            args, kwargs = _guarded((one.args, one.kwargs), outer, name)
            for key, hook in list(one.module._forward_hooks.items()):
                if key in one.module._forward_hooks_with_kwargs:
                    replaced = hook(one.module, args, kwargs, output)
                else:
                    replaced = hook(one.module, args, output)
                inside = [t for t in tensors[start - n : start] if id(t) not in whole]
                if any(t._backward_hooks or t.retains_grad for t in inside):
                    raise InputError(
                        f"a forward hook on a {type(one.module).__name__} inside {name} registers a hook on the "
                        "gradient of its output, or calls retain_grad() on it, and would miss gradients from inside "
                        "the block: do it in the module's forward, or use register_full_backward_hook"
                    )
                if replaced is not None:
                    raise ReplacedOutput(
                        f"a forward hook on a {type(one.module).__name__} inside {name} returns another output; hooks "
                        "inside streamed blocks may look at outputs but not replace them: do it in the module's "
                        "forward, or register the hook before stream() on a module outside the blocks"
                    )


@dataclass(slots=True)
class KeptByHooks:
    """``nbytes``: of tensors that hooks have put into lists and dictionaries, which are there until the next call."""

    nbytes: int = 0


@contextlib.contextmanager
def hooks_unchanged(modules: Sequence[nn.Module]) -> Iterator[KeptByHooks]:
    """What the forward hooks of ``modules`` keep (lists, dictionaries, attributes) is afterwards as it was before."""
    hooks = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    kept = [(thing, copy.copy(thing)) for thing in containers_behind(hooks)]
    found, before = KeptByHooks(), {id(t) for t in tensors_in([thing for thing, _ in kept])}
    try:
        yield found
    finally:
        new = [t for t in tensors_in([thing for thing, _ in kept]) if id(t) not in before]
        found.nbytes = sum(storages(new).values())
        for thing, before in kept:
            refill(thing, before)


def hooked(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that have forward hooks."""
    return [m for m in modules if m._forward_hooks]


@contextlib.contextmanager
def capturing(modules: Sequence[nn.Module]) -> Iterator[Captured]:
    """Inside, hooks of ``modules`` are not called; what they would have seen is captured."""
    captured = Captured()

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        state, live = take_apart(output)
        captured.shown.append(
            Shown(module, args, kwargs, State((), state.requires, state.others, state.slots, state.spec))
        )
        captured.tensors.extend(live)

    before = [(m, m._forward_hooks, m._forward_hooks_with_kwargs) for m in modules]
    for m, _, _ in before:
        m._forward_hooks, m._forward_hooks_with_kwargs = OrderedDict({_KEY: look}), OrderedDict({_KEY: True})
    try:
        yield captured
    finally:
        for m, hooks, with_kwargs in before:
            m._forward_hooks, m._forward_hooks_with_kwargs = hooks, with_kwargs


def _guarded(tree: Any, outer: dict[int, torch.Tensor], name: str) -> Any:
    """Inputs of a module inside the block: a gradient asked for through its own tensors would be lost, so it
    raises."""
    root = root_of_graph()

    def guard(leaf: Any) -> Any:
        if id(leaf) in outer:
            return outer[id(leaf)]
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return Guard.apply(root, leaf.detach(), name)  # type: ignore[no-untyped-call]
        return leaf

    return pytree.tree_map(guard, tree)
