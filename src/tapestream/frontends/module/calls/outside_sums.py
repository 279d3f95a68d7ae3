"""`OutsideSums`: gradients of parameters outside of blocks, summed over ranks when a backward has ended."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.sharing import Sharing

OUTSIDE = -1
"""What such parameters are announced as: after all blocks."""


class OutsideSums:
    """Of one call. What ``.grad`` shows is put aside just before autograd adds to it: to each rank's gradient alone the
    others are added, in the order of ranks. ``sharing`` None: nothing is summed, in one process. ``earlier``: what was
    put aside, by ``id`` of the parameter."""

    def __init__(self, sharing: Sharing | None, parameters: Iterable[nn.Parameter] = ()) -> None:
        self.sharing = sharing
        self._parameters = [p for p in parameters if p.requires_grad and sharing is not None]
        self.earlier: dict[int, torch.Tensor | None] = {}
        self._nodes = [get_gradient_edge(p).node for p in self._parameters]  # which else would go before they are used
        self._handles = [
            node.register_prehook(_putting_aside(p, self.earlier))
            for node, p in zip(self._nodes, self._parameters, strict=True)
        ]

    def begins(self, calls: int) -> None:
        """A backward begins. Raises InputError where it may go through several ``calls``."""
        if self.sharing is not None and calls > 1:
            raise InputError(
                f"{calls} calls of a streamed model with peers= await their backward, but its gradients are summed "
                "over ranks backward by backward, one call each: call backward() before the next forward, or drop what "
                "a call has returned (del loss)"
            )

    def sum(self, store: BlockStore, *, wanted: bool) -> None:
        """The backward has ended: take part in what the other ranks still sum, then sum these, and let all know.
        ``wanted``: gradients of parameters were asked for."""
        if self.sharing is None or not wanted:
            return
        own = self._parameters
        fresh = {n: p.grad for n, p in enumerate(own) if id(p) in self.earlier and p.grad is not None}
        if own:
            store.share(OUTSIDE, [n in fresh for n in range(len(own))])
            there = {n: self.earlier.get(id(p), p.grad) for n, p in enumerate(own)}
            found = self.sharing.sum(own, fresh, {n: g for n, g in there.items() if g is not None})
            for number, total in found.items():
                own[number].grad = total
        self.earlier.clear()
        store.share(None)

    def end(self) -> None:
        """The call is over. After a failed backward, ``.grad`` shows what it did before."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()
        for p in self._parameters:
            if id(p) in self.earlier:
                p.grad = self.earlier.pop(id(p))


def _putting_aside(parameter: nn.Parameter, earlier: dict[int, torch.Tensor | None]) -> Callable[[Any], None]:
    def put_aside(_: Any) -> None:
        if id(parameter) not in earlier:
            earlier[id(parameter)], parameter.grad = parameter.grad, None

    return put_aside
