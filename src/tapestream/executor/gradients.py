"""`Gradients`: from the end of a block's backward to ``.grad``, in the order in which plain autograd adds."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from tapestream.executor.copies import BlockCopies
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.storage.regions import Region

Found: TypeAlias = dict[int, torch.Tensor]
"""Gradients of a block by parameter number."""
Sums: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By ``id`` of a parameter: the parameter and what one call has accumulated for it."""


class GradientBook:
    """Gradients that a backward has made and users do not see yet.

    Plain PyTorch adds up all of one backward, then adds the sum to ``.grad``. Where a backward goes through several calls of the model
    (``together``), what the first leaves for a block is therefore the start of the next one's sum, and is added to earlier
    gradients at the end.
    """

    def __init__(self, copies: BlockCopies) -> None:
        self.copies = copies
        self.fresh: dict[int, Found] = {}  # taken from a call, not yet laid out
        self.together = False
        self._arrived: dict[int, list[int]] = {}  # laid out and sent home, not yet shown by .grad
        self._earlier: dict[int, Region | None] = {}  # what .grad shows while this backward's sums lie at home

    def take(self, block: int, sums: Sums) -> None:
        """Take a block's gradients over from a call that adds no more to them."""
        found: Found = {}
        for i, parameter in enumerate(self.copies.blocks[block].parameters):
            entry = sums.pop(id(parameter), None)
            if entry is not None:
                found[i] = entry[1]
        if found:
            self.fresh[block] = found

    def seed(self, block: int, sums: Sums) -> None:
        """Let a call go on from what another one of the same backward has left for the block."""
        parameters = self.copies.blocks[block].parameters
        for i, gradient in self.fresh.pop(block, {}).items():
            sums[id(parameters[i])] = (parameters[i], gradient)
        value = Value(Kind.GRADIENT, block)
        arrived = self._arrived.pop(block, [])
        if arrived:
            self.copies.wait(value, self.copies.home)
            views = self.copies.blocks[block].views(self.copies.bytes_at(value, self.copies.home))
            for i in arrived:
                sums[id(parameters[i])] = (parameters[i], views[i].to(self.copies.device, copy=True))

    def lay_out(self, block: int) -> None:
        """Bring the fresh gradients into one region on the device, added to what earlier backwards left at home."""
        copies, this, value = self.copies, self.copies.blocks[block], Value(Kind.GRADIENT, block)
        fresh = {i: through_hooks(this.parameters[i], g) for i, g in self.fresh.pop(block).items()}
        if self.together:
            self._put_aside(value)
        else:
            self._make_room(value)
        earlier = {} if self.together else {i: p.grad for i, p in enumerate(this.parameters) if p.grad is not None}
        at_home = self._all_at_home(block, earlier)
        if at_home:
            copies.copy_now(value, copies.home, Tier.DEVICE)  # not through the mapping: its pages would stay in memory
        region = copies.region(value, Tier.DEVICE)
        copies.engine.compute_begins([region])
        for i, view in enumerate(this.views(region.memory)):
            before, gradient = earlier.get(i), fresh.pop(i, None)
            if before is not None and not at_home:
                view.copy_(before)
            if gradient is not None:
                view.copy_(gradient) if before is None else view.add_(gradient)
            if gradient is not None or before is not None:
                self._arrived.setdefault(block, []).append(i)
        copies.engine.compute_ended([region])

    def at_step(self, block: int) -> Found:
        """Gradients for an update: those that users see, read from the device copy where one was fetched."""
        this, value = self.copies.blocks[block], Value(Kind.GRADIENT, block)
        region = self.copies.regions.get((value, Tier.DEVICE))
        fetched = None if region is None else this.views(region.memory)
        shown = {i: p.grad for i, p in enumerate(this.parameters) if p.grad is not None}
        own = self._own(block) if fetched is not None else ()
        return {
            i: fetched[i] if fetched is not None and gradient.data_ptr() in own else gradient.to(self.copies.device)
            for i, gradient in shown.items()
        }

    def send_home(self, block: int) -> None:
        """All that a schedule does for a block's gradient, at once."""
        value = Value(Kind.GRADIENT, block)
        self.lay_out(block)
        self.copies.copy_now(value, Tier.DEVICE, self.copies.home)
        self.copies.release(value, Tier.DEVICE)

    def accumulate(self, block: int) -> None:
        """Let ``.grad`` have the fresh gradients as they are: they stay on the device."""
        for i, gradient in self.fresh.pop(block).items():
            parameter = self.copies.blocks[block].parameters[i]
            gradient = through_hooks(parameter, gradient)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                with torch.no_grad():
                    parameter.grad.add_(gradient)
            _after_accumulation(parameter)

    def publish(self) -> None:
        """Let ``.grad`` be the gradients that came home."""
        for block, arrived in self._arrived.items():
            value, parameters = Value(Kind.GRADIENT, block), self.copies.blocks[block].parameters
            views = self.copies.blocks[block].views(self.copies.bytes_at(value, self.copies.home))
            for i in arrived:
                before = parameters[i].grad if block in self._earlier else None
                if before is not None:
                    views[i].copy_(before.add_(views[i]))
                parameters[i].grad = views[i]
                _after_accumulation(parameters[i])
            self._forget(block)
        self._arrived.clear()
        self.together = False

    def clear(self) -> None:
        """Drop what no one sees yet."""
        self.fresh.clear()

    def _put_aside(self, value: Value) -> None:
        """This backward's sum gets a home of its own beside the bytes that ``.grad`` shows."""
        if value.index not in self._earlier:
            self._earlier[value.index] = self.copies.regions.pop((value, self.copies.home), None)

    def _forget(self, block: int) -> None:
        region = self._earlier.pop(block, None)
        if region is not None:
            self.copies.pool.release(region)

    def _make_room(self, value: Value) -> None:
        """A gradient at home that users hold although no ``.grad`` shows it any more stays as it is: the next gets other bytes."""
        if self.copies.has(value, self.copies.home):
            block = self.copies.blocks[value.index]
            own = self._own(value.index)
            if not any(p.grad is not None and p.grad.data_ptr() in own for p in block.parameters):
                self.copies.abandon(value, self.copies.home)

    def _all_at_home(self, block: int, earlier: Mapping[int, torch.Tensor]) -> bool:
        own = self._own(block) if earlier else ()
        return bool(earlier) and all(gradient.data_ptr() in own for gradient in earlier.values())

    def _own(self, block: int) -> frozenset[int]:
        """Addresses of the block's gradients at home."""
        value = Value(Kind.GRADIENT, block)
        if not self.copies.has(value, self.copies.home):
            return frozenset()
        memory = self.copies.bytes_at(value, self.copies.home)
        return frozenset(view.data_ptr() for view in self.copies.blocks[block].views(memory))


def through_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What autograd does with a leaf's hooks: each may replace the gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _after_accumulation(parameter: torch.Tensor) -> None:
    hooks: Mapping[int, Callable[[torch.Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        hook(parameter)
