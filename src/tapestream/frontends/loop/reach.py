"""What a step reaches without being given it: tensors and generators in closures, globals that it names, attributes."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from tapestream.errors import GradientError
from tapestream.runner.ambient import GENERATORS
from tapestream.runner.captured import cell_contents
from tapestream.runner.depth import SHALLOW, deeper

_NAMED = (torch.Tensor, nn.Module, list, tuple, dict, *GENERATORS)
"""What a global name may stand for to be looked at."""


def tensors_behind(function: Callable[..., Any]) -> list[torch.Tensor]:
    """Those that require a gradient, each once, parameters of modules included."""
    return [item for item in _reached(function) if isinstance(item, torch.Tensor) and item.requires_grad]


def generators_behind(function: Callable[..., Any]) -> list[Any]:
    """Random generators that are objects of their own."""
    return [item for item in _reached(function) if isinstance(item, GENERATORS)]


def _reached(function: Callable[..., Any]) -> list[Any]:
    """Tensors and generators, each once."""
    seen: set[int] = set()
    found: list[Any] = []
    waiting: list[Any] = [function]
    while waiting:
        item = waiting.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, (torch.Tensor, *GENERATORS)):
            found.append(item)
        elif isinstance(item, nn.Module):
            waiting.extend(p for m in item.modules() for p in m._parameters.values())
            waiting.extend(vars(m).values() for m in item.modules())
        elif isinstance(item, functools.partial):
            waiting.extend((item.func, *item.args, *item.keywords.values()))
        elif inspect.ismethod(item):
            waiting.extend((item.__self__, item.__func__))
        elif inspect.isfunction(item):
            waiting.extend(_behind(item))
        elif isinstance(item, (list, tuple, set)) or type(item).__name__ == "dict_values":
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif not isinstance(item, type) and not inspect.isbuiltin(item) and not inspect.ismodule(item):
            waiting.append(getattr(item, "__dict__", None))
    return found


def _behind(function: Any) -> list[Any]:
    found = list(cell_contents(function))
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    found.extend(thing for thing in named if isinstance(thing, _NAMED))
    found.extend((function.__defaults__, function.__kwdefaults__))
    # Helpers beside the step, not those of libraries: these lead everywhere.
    found.extend(f for f in named if inspect.isfunction(f) and f.__globals__ is function.__globals__)
    return found


def ends_of(
    outputs: Sequence[torch.Tensor], since: int, candidates: Sequence[torch.Tensor], own: frozenset[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the graph of ``outputs``, built since sequence number ``since``, ends: leaves, and tensors made before.

    The latter are found among ``candidates``, what operations were given. ``own``: ids of leaves left out. Raises
    GradientError for one that is not among them: its gradient would be lost.
    """
    known = {(t.grad_fn, t.output_nr): t for t in candidates}
    leaves = {id(t): t for t in outputs if t.requires_grad and t.grad_fn is None and id(t) not in own}
    made: dict[int, torch.Tensor] = {}
    edges: list[tuple[Node, int]] = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
    seen, most = set(edges), SHALLOW
    while edges:
        if len(seen) > most:
            most = deeper(most)
        node, number = edges.pop()
        variable = getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None
        if variable is not None:
            if id(variable) not in own:
                leaves[id(variable)] = variable
            continue
        if node._sequence_nr() < since:
            if (node, number) not in known:
                raise GradientError(
                    f"Loop: a step uses a tensor that was computed before the loop (made by {node.name()}) and that "
                    "the loop cannot see; pass it through the state, so that its gradient is not lost, or detach() it"
                )
            tensor = known[node, number]
            made[id(tensor)] = tensor
            continue
        for edge in node.next_functions:
            if edge[0] is not None and edge not in seen:
                seen.add(edge)  # type: ignore[arg-type]
                edges.append(edge)  # type: ignore[arg-type]
    return list(leaves.values()), list(made.values())
