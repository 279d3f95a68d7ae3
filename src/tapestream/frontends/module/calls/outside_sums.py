"""`OutsideSums`: gradients of parameters outside of blocks, summed over ranks when a backward has ended."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.sharing import Sharing

OUTSIDE = -1
"""What such parameters are announced as: after all blocks."""


class OutsideSums:
    """Of one model. What ``.grad`` shows is put aside just before autograd adds to it, whichever backward it is: when
    that has ended, each rank's gradient is added to it, in the order of ranks. ``sharing`` None: nothing is summed, in
    one process. ``earlier``: what was put aside, by ``id`` of the parameter."""

    def __init__(self, sharing: Sharing | None, store: BlockStore) -> None:
        self.sharing, self._store = sharing, store
        self._parameters: list[nn.Parameter] = []
        self._nodes: list[tuple[Node, RemovableHandle]] = []  # which would go without us, and be made anew
        self.earlier: dict[int, torch.Tensor | None] = {}
        self._hooks: dict[int, dict[int, Callable[[Any], None]]] = {}  # after accumulation, which wait for the sum
        self._task = -1  # the backward that is under way
        self._through_blocks = False

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """These are outside of blocks now; no backward is under way."""
        if self.sharing is None:
            return
        self.fail()
        trained = [p for p in parameters if p.requires_grad]
        if list(map(id, trained)) == list(map(id, self._parameters)):
            return
        self.end()
        self._parameters, this = trained, weakref.ref(self)
        nodes = [get_gradient_edge(p).node for p in trained]
        self._nodes = [(n, n.register_prehook(_putting_aside(this, p))) for n, p in zip(nodes, trained, strict=True)]

    def put_aside(self, parameter: nn.Parameter) -> None:
        """Autograd is about to add to a parameter's gradient."""
        self._enter()
        if id(parameter) not in self.earlier:
            self.earlier[id(parameter)], parameter.grad = parameter.grad, None
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks:
                self._hooks[id(parameter)] = dict(hooks)
                hooks.clear()

    def begins(self, calls: int) -> None:
        """A backward has reached the blocks. Raises InputError where it may go through several ``calls``."""
        if self.sharing is None:
            return
        self._enter()
        self._through_blocks = True
        if calls > 1:
            raise InputError(
                f"{calls} calls of a streamed model with peers= await their backward, but its gradients are summed "
                "over ranks backward by backward, one call each: call backward() before the next forward, or drop what "
                "a call has returned (del loss)"
            )

    def sum(self, *, wanted: bool) -> None:
        """A backward that reached the blocks has ended: take part in what the other ranks still sum, then sum these,
        and let all know. ``wanted``: gradients of the blocks' parameters were asked for."""
        divided = self._store.copies.shards is not None  # plans sum gradients all the same
        if self.sharing is None or not (wanted or self.earlier or divided):
            return
        own = self._parameters
        fresh = {n: p.grad for n, p in enumerate(own) if id(p) in self.earlier and p.grad is not None}
        if own:
            self._store.share(OUTSIDE, [fresh.get(n) for n in range(len(own))])
            there = {n: self.earlier.get(id(p), p.grad) for n, p in enumerate(own)}
            found = self.sharing.sum(own, fresh, {n: g for n, g in there.items() if g is not None})
            for number, total in found.items():
                own[number].grad = total
        self.earlier.clear()
        self._store.share(None)
        for p in own:
            waiting = self._hooks.pop(id(p), None)
            if waiting:
                p._post_accumulate_grad_hooks.update(waiting)
                for hook in waiting.values():
                    hook(p)

    def fail(self) -> None:
        """No backward is under way: after one that has failed, ``.grad`` shows what it did before."""
        if self.earlier and self.sharing is not None:
            self.sharing.fail()
        for p in self._parameters:
            if id(p) in self.earlier:
                p.grad = self.earlier.pop(id(p))
            if id(p) in self._hooks:
                p._post_accumulate_grad_hooks.update(self._hooks.pop(id(p)))

    def end(self) -> None:
        """Let go of the parameters."""
        for _, handle in self._nodes:
            handle.remove()
        self._nodes.clear()
        self._parameters.clear()

    def _enter(self) -> None:
        """Inside of a backward."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self.fail()  # the last one's, if it has left anything
        self._task, self._through_blocks = task, False
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        """A backward has ended, be it one that reached no block that is trained."""
        if self._through_blocks or not self.earlier:
            return
        try:
            self.sum(wanted=False)
        except BaseException:
            self.fail()
            raise


def _putting_aside(sums: "weakref.ref[OutsideSums]", parameter: nn.Parameter) -> Callable[[Any], None]:
    def put_aside(_: Any) -> None:
        found = sums()  # which the model holds
        if found is not None:
            found.put_aside(parameter)

    return put_aside
