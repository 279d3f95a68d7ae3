"""Where the graph of a step ends."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from tapestream.errors import GradientError
from tapestream.runner.depth import SHALLOW, deeper


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
