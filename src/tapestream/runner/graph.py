"""Looks at the autograd graph that one run of a stage has built."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import GradientError
from tapestream.runner.depth import SHALLOW, deeper


def let_go_of_failed_backward() -> None:
    """Until its next backward, a thread holds the graph of one that has ended in an exception, with all that this has
    saved: have one, of nothing."""
    if torch._C._current_graph_task_id() == -1:
        with torch.enable_grad():
            torch.zeros((), requires_grad=True, device="cpu").backward()  # type: ignore[no-untyped-call]


def root_of_graph() -> torch.Tensor:
    """An empty tensor on the CPU, whatever the default device is, for a graph to start from."""
    return torch.empty(0, requires_grad=True, device="cpu")


def gradient_edges(leaves: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Where the gradients of ``leaves`` arrive, also inside inference mode, which may be entered around backward."""
    with torch.inference_mode(False):
        return list(map(get_gradient_edge, leaves))


def next_sequence_number() -> int:
    """A number that only autograd nodes made later reach."""
    return int(torch._C._autograd._get_sequence_nr())


def numbered_here(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside, autograd's own threads make no nodes: a backward that is part of the forward (`torch.autograd.grad` with
    ``create_graph=True``) runs on this thread. Numbers of nodes are a thread's own, and tell here which came first."""
    if not is_accelerator(device):  # such a backward runs on the calling thread anyway
        return contextlib.nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


def reached_leaves(
    outputs: Sequence[torch.Tensor],
    since: int,
    name: str | Callable[[int], str],
    inputs: frozenset[int] = frozenset(),
) -> list[torch.Tensor]:
    """The leaf tensors (parameters, captured tensors) whose gradients the graph of ``outputs`` reaches, in a fixed
    order.

    ``name``: the stage's, or a function from sequence number to name where several built the graph. ``inputs``: ids of
    the stage's own input leaves, left out. Raises GradientError when the graph leaves the stage
    other
    than through a leaf, since a gradient would then be lost: a tensor computed before and captured.
    """
    leaves: dict[int, torch.Tensor] = {}
    for output in outputs:
        if output.requires_grad and output.grad_fn is None and id(output) not in inputs:
            leaves[id(output)] = output
    for node in _nodes(outputs):
        if isinstance(node, _AccumulateGrad):
            variable = node.variable
            if id(variable) not in inputs:
                leaves[id(variable)] = variable
        elif node._sequence_nr() < since:
            user = name if isinstance(name, str) else name(user_of(outputs, node))
            raise GradientError(
                f"{user} uses a tensor that was computed before the stage and requires a gradient (made by "
                f"{node.name()}); pass it through the state, so that its gradient is not lost, or detach(). If a "
                "module keeps it from an earlier call (a cache), switch that off: use_cache=False, say; if the cache "
                "holds learned keys and values (prefix tuning), tune prompts or LoRA adapters instead"
            )
    return list(leaves.values())


def leaves_behind(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that the graph of ``outputs`` reaches, wherever it was made."""
    found = (_variable(node) for node in _nodes(outputs))
    own = [t for t in outputs if t.requires_grad and t.grad_fn is None]
    return [*own, *(leaf for leaf in found if leaf is not None)]


def edges_behind(outputs: Sequence[torch.Tensor], seen: set[Node]) -> Iterator[tuple[Node, int]]:
    """What the nodes of the graph of ``outputs`` use, but for those in ``seen``, which all are afterwards: a node each,
    and which of its outputs."""
    for node in _nodes(outputs, seen):
        yield from ((used, number) for used, number in node.next_functions if used is not None)


def user_of(outputs: Sequence[torch.Tensor], used: Node | torch.Tensor) -> int:
    """The sequence number of a node that uses ``used`` (a node, or a leaf); of the next node if none does."""
    for node in _nodes(outputs):
        for following, _ in node.next_functions:
            if following is not None and (following is used or _variable(following) is used):
                return int(node._sequence_nr())
    return next_sequence_number()


def node_names(outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Names of the nodes of the graph of ``outputs``, in a fixed order: two equal runs give equal names."""
    return tuple(node.name() for node in _nodes(outputs))


class Uses(NamedTuple):
    """How a graph uses its leaves, by their ids: through casts alone, otherwise, more than once; and whether it casts
    any leaf twice."""

    casts: frozenset[int]
    uncast: frozenset[int]
    repeated: frozenset[int]
    casts_twice: bool


def uses_of_leaves(outputs: Sequence[torch.Tensor]) -> Uses:
    """How the graph of ``outputs`` uses its leaves."""
    casts, others = Counter[int](), Counter[int]()
    for node in _nodes(outputs):
        for following, _ in node.next_functions:
            variable = None if following is None else _variable(following)
            if variable is not None:
                (casts if node.name() == "ToCopyBackward0" else others)[id(variable)] += 1
    repeated = frozenset(key for key, count in (casts + others).items() if count > 1)
    return Uses(frozenset(casts.keys() - others), frozenset(others), repeated, any(n > 1 for n in casts.values()))


def times_used(outputs: Sequence[torch.Tensor], nodes: Sequence[Node | None]) -> list[int]:
    """How often the graph of ``outputs`` uses what each of ``nodes`` has made, outputs themselves among that."""
    into = Counter(following for node in _nodes(outputs) for following, _ in node.next_functions)
    into.update({id(t): t.grad_fn for t in outputs}.values())
    return [0 if node is None else into[node] for node in nodes]


def used_again(outputs: Sequence[torch.Tensor], nodes: Sequence[Node | None]) -> frozenset[int]:
    """By place, which of ``nodes`` have made what the graph of ``outputs`` uses more than once."""
    return frozenset(i for i, times in enumerate(times_used(outputs, nodes)) if times > 1)


def flows_alone(outputs: Sequence[torch.Tensor], start: Node | None, end: Node) -> bool:
    """Whether the gradient at ``start`` flows to ``end`` and nowhere else, and in the graph of ``outputs`` nothing else
    flows into what comes after ``start``, nor into ``end``."""
    into = Counter(following for node in _nodes(outputs) for following, _ in node.next_functions)
    into.update(t.grad_fn for t in outputs if t.grad_fn is not start)
    node = start
    while node is not end:
        following = [] if node is None else [found for found, _ in node.next_functions if found is not None]
        if len(following) != 1 or into[following[0]] != 1:
            return False
        node = following[0]
    return True


def _nodes(outputs: Sequence[torch.Tensor], seen: set[Node] | None = None) -> Iterator[Node]:
    seen = set() if seen is None else seen
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None and t.grad_fn not in seen]
    most = max(SHALLOW, len(seen))
    seen.update(stack)
    while stack:
        if len(seen) > most:
            most = deeper(most)
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
