"""Looks at the autograd graph that one run of a stage has built."""

from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import Node

from tapestream.errors import GradientError


def next_sequence_number() -> int:
    """A number that only autograd nodes made later reach."""
    return int(torch._C._autograd._get_sequence_nr())


def reached_leaves(
    outputs: Sequence[torch.Tensor], since: int, name: str, inputs: frozenset[int] = frozenset()
) -> list[torch.Tensor]:
    """The leaf tensors (parameters, captured tensors) whose gradients the graph of ``outputs`` reaches, in a fixed
    order.

    ``inputs``: ids of the stage's own input leaves, left out. Raises GradientError when the graph leaves the stage
    other
    than through a leaf, since a gradient would then be lost: a tensor computed before and captured.
    """
    leaves: dict[int, torch.Tensor] = {}
    for output in outputs:
        if output.requires_grad and output.grad_fn is None and id(output) not in inputs:
            leaves[id(output)] = output
    for node in _nodes(outputs):
        variable = _variable(node)
        if variable is not None:
            if id(variable) not in inputs:
                leaves[id(variable)] = variable
        elif node._sequence_nr() < since:
            raise GradientError(
                f"{name} uses a tensor that was computed before the stage and requires a gradient "
                f"(made by {node.name()}); pass it through the state, so that its gradient is not lost, or detach() it"
            )
    return list(leaves.values())


def node_names(outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Names of the nodes of the graph of ``outputs``, in a fixed order: two equal runs give equal names."""
    return tuple(node.name() for node in _nodes(outputs))


def cast_leaves(outputs: Sequence[torch.Tensor]) -> tuple[frozenset[int], frozenset[int], bool]:
    """Ids of leaves that the graph uses through casts alone, ids of those it uses otherwise, and whether it casts
    any leaf twice."""
    casts: dict[int, int] = {}
    others: set[int] = set()
    for node in _nodes(outputs):
        for following, _ in node.next_functions:
            variable = None if following is None else _variable(following)
            if variable is None:
                continue
            if node.name() == "ToCopyBackward0":
                casts[id(variable)] = casts.get(id(variable), 0) + 1
            else:
                others.add(id(variable))
    return frozenset(casts.keys() - others), frozenset(others), any(count > 1 for count in casts.values())


def _nodes(outputs: Sequence[torch.Tensor]) -> Iterator[Node]:
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[Node] = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _variable(node: Node) -> torch.Tensor | None:
    """The leaf behind an AccumulateGrad node, None for any other node."""
    return node.variable if isinstance(node, _AccumulateGrad) else None


_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
