"""Backwards with ``create_graph=True`` through a streamed model: what their graph holds, which no plan has."""

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of
from tapestream.runner.graph import next_sequence_number
from tapestream.runner.state import storages
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.calls.call import StreamCall


class SecondOrder:
    """One such backward of ``call``, within ``budget_nbytes``: the graph of the gradients that arrive at the blocks is
    looked through when it has ended."""

    def __init__(self, call: "StreamCall", budget_nbytes: int) -> None:
        self._call, self._budget, self._since = weakref.ref(call), budget_nbytes, next_sequence_number()
        self._planned = call.prepared.shared_nbytes + call.prepared.held_nbytes
        self._last: list[Any] = []
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def arrive(self, cotangents: Sequence[torch.Tensor | None]) -> None:
        """At a block."""
        self._last = [t.grad_fn for t in cotangents if t is not None and t.grad_fn is not None] or self._last

    def _end(self) -> None:
        """Raise BudgetError where what it holds, and what differentiating it makes, is more than the budget."""
        new, old = dict[int, int](), dict[int, int]()
        nodes, self._last = self._last, []
        for node in _below(nodes):
            (new if node._sequence_nr() >= self._since else old).update(storages(_saved_by(node)))
        held = sum(nbytes for address, nbytes in new.items() if address not in old)
        needed = self._planned + 3 * held // 2
        if held and needed > limit_of(self._budget):
            if (call := self._call()) is not None:
                call.abort()
            raise BudgetError(
                f"a budget of {format_nbytes(self._budget)} was asked for, but a gradient of a streamed model with "
                f"create_graph=True holds {format_nbytes(held)} for its own graph, and to differentiate it takes about "
                f"{format_nbytes(needed)} ({needed} bytes) in all: allow that much, give the model less at once (a "
                "smaller batch), or leave create_graph out",
                least_nbytes=needed,
            )


def _below(nodes: Sequence[Any]) -> Iterator[Any]:
    """Those of a graph, each once."""
    seen, waiting = set(nodes), [*nodes]
    while waiting:
        yield (node := waiting.pop())
        following = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        waiting += following


def _saved_by(node: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                value = getattr(node, name)
            except RuntimeError:  # gone after another backward
                continue
            found += [one for one in (value if isinstance(value, (tuple, list)) else (value,)) if _has_memory(one)]
    return found


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
