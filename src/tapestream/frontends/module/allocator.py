"""What PyTorch's allocator takes on a device, beside what streamed models there were allowed."""

import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import AllocatorBytes, allocator_bytes, tensor_nbytes, workspaces_nbytes
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.ir.actions import Tier
from tapestream.planning.exceeded import Exceeded
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

_ALLOCATED_SHARE, _ALLOCATED_SLACK_NBYTES = 1.02, 1 << 20
_RESERVED_SHARE, _RESERVED_SLACK_NBYTES = 1.05, 64 << 20
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts"

_UNKNOWN = (
    "something made tensors that the profiled call did not (a hook, the backward of an autograd.Function, code between "
    "blocks); leave it out, or allow that much"
)

_streamed: "weakref.WeakSet[Streamed]" = weakref.WeakSet()


class AllocatorWatch:
    """Warns, once each, where the allocator has come to take more than the streamed models of a device may.

    *Allocated*: 1.02 times the budgets and 1 MiB are let pass. More is `BudgetExceeded`, unless what was asked for is
    not: tensors of more than 1 MiB get pieces that are up to 1 MiB larger, which no plan can know. *Reserved*: pieces
    that fit nothing are missing all the same; 1.05 times the budgets and 64 MiB are let pass.
    """

    def __init__(self, handle: "Streamed") -> None:
        self._allocated = self._reserved = is_accelerator(handle.device)  # whether they are still watched
        self._device, self.exceeded = handle.device, Exceeded("stream")
        self._begun: AllocatorBytes | None = None
        self._most: AllocatorBytes | None = None  # since somebody looked
        self._allowed_then = 0  # all models that were there: one that is gone may have had its bytes at the peak
        if self._reserved:
            _streamed.add(handle)
            ours = workspaces_nbytes(handle.device) + sum(map(_present_nbytes, self._streamed_there()))
            before = allocator_bytes(handle.device)
            self._reserved_before, self._others_before = before.reserved, before.allocated - ours

    def begins(self) -> None:
        """A forward, a backward or a step does: what others take between them is no concern of the budget."""
        if self._allocated:
            self._begun = allocator_bytes(self._device)
            self._allowed_then = max(self._allowed_then, self._allowed())

    def ended(self) -> None:
        """It has ended. Peaks that it did not reach are not known, and were there before."""
        begun, self._begun = self._begun, None
        if begun is not None:
            now = allocator_bytes(self._device)
            if now.peak > max(begun.peak, 0 if self._most is None else self._most.peak):
                self._most = now

    def look(self, handle: "Streamed") -> None:
        """Between two calls of the model."""
        if not (self._allocated or self._reserved):
            return
        there = self._streamed_there()
        allowed, self._allowed_then = max(self._allowed_then, self._allowed()), 0
        now, most, self._most = allocator_bytes(handle.device), self._most, None
        allocated = 0 if most is None else most.peak - self._others_before
        unasked = 0 if most is None else most.peak - most.peak_requested
        reserved = now.reserved - self._reserved_before
        if self._too_much_allocated(allocated, allowed) or self._too_much_reserved(reserved, allowed):
            more = max(0, now.allocated - sum(map(_held_nbytes, there)) - self._others_before)  # that others have
            self._warn_of_allocated(allocated - more, unasked, allowed)
            self._warn_of_reserved(reserved - more, allowed)

    def _allowed(self) -> int:
        return sum(other.budget.device_nbytes or 0 for other in self._streamed_there())

    def _streamed_there(self) -> list["Streamed"]:
        return [handle for handle in _streamed if handle.device == self._device]

    def _too_much_allocated(self, nbytes: int, allowed: int) -> bool:
        return self._allocated and nbytes > _ALLOCATED_SHARE * allowed + _ALLOCATED_SLACK_NBYTES

    def _too_much_reserved(self, nbytes: int, allowed: int) -> bool:
        return self._reserved and nbytes > _RESERVED_SHARE * allowed + _RESERVED_SLACK_NBYTES

    def _warn_of_allocated(self, nbytes: int, unasked: int, allowed: int) -> None:
        if not self._too_much_allocated(nbytes, allowed):
            return
        if self._too_much_allocated(nbytes - unasked, allowed):
            self.exceeded.say(nbytes - unasked, allowed, _UNKNOWN)
            return
        self._allocated = False
        warnings.warn(
            f"tensors have taken {format_nbytes(nbytes)} ({nbytes} bytes) of {self._device} for a budget of "
            f"{format_nbytes(allowed)}, but had asked for {format_nbytes(unasked)} less: PyTorch's allocator gives a "
            f"tensor the rest of its piece of memory, up to 1 MiB. Set {_EXPANDABLE}, which splits the rest off, or "
            f"allow {format_nbytes(nbytes - allowed)} less",
            stacklevel=4,
        )

    def _warn_of_reserved(self, nbytes: int, allowed: int) -> None:
        if not self._too_much_reserved(nbytes, allowed):
            return
        self._reserved = False
        warnings.warn(
            f"PyTorch's allocator has reserved {format_nbytes(nbytes)} of {self._device} for a budget of "
            f"{format_nbytes(allowed)}: some pieces of memory fit no tensor, or were left by other code. Set "
            f"{_EXPANDABLE}; torch.{self._device.type}.empty_cache() releases unused memory",
            stacklevel=4,
        )


def _present_nbytes(handle: "Streamed") -> int:
    """Bytes of the device that a model which is about to be streamed takes."""
    outside = [*handle.outside_parameters(), *handle.model.buffers()]
    return _nbytes_there(handle, outside) + handle.pool.held_nbytes(Tier.DEVICE)


def _held_nbytes(handle: "Streamed") -> int:
    """Bytes of the device that a streamed model keeps between two calls."""
    gradients = [p.grad for block in handle.store.blocks for p in block.parameters if p.grad is not None]
    return outside_nbytes(handle) + handle.pool.held_nbytes(Tier.DEVICE) + _nbytes_there(handle, gradients)


def _nbytes_there(handle: "Streamed", tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor_nbytes(t) for t in tensors if t.device == handle.device)
