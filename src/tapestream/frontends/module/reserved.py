"""What PyTorch's allocator reserves on a device, beside what streamed models there were allowed."""

import warnings
import weakref
from typing import TYPE_CHECKING

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import allocated_nbytes, reserved_nbytes
from tapestream.frontends.module.plans.prepare import outside_nbytes
from tapestream.ir.actions import Tier
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

_SHARE = 1.05
_SLACK_NBYTES = 64 << 20

_streamed: "weakref.WeakSet[Streamed]" = weakref.WeakSet()


class ReservedWatch:
    """Warns, once, where the allocator has come to hold far more than the streamed models of a device may take: 1.05
    times their budgets and 64 MiB. A budget is for what is allocated; what is reserved beside that, pieces that fit
    nothing, is missing all the same."""

    def __init__(self, handle: "Streamed") -> None:
        self._watches = is_accelerator(handle.device)
        if self._watches:
            _streamed.add(handle)
            self._reserved, self._allocated = reserved_nbytes(handle.device), allocated_nbytes(handle.device)

    def look(self, handle: "Streamed") -> None:
        """Between two calls of the model."""
        if not self._watches:
            return
        there = [other for other in _streamed if other.device == handle.device]
        allowed = sum(other.budget.device_nbytes or 0 for other in there)
        more = reserved_nbytes(handle.device) - self._reserved  # since the model is streamed
        if more <= _SHARE * allowed + _SLACK_NBYTES:
            return
        ours = sum(outside_nbytes(other) + other.pool.held_nbytes(Tier.DEVICE) for other in there)
        more -= max(0, allocated_nbytes(handle.device) - ours - self._allocated)  # somebody else's tensors
        if more <= _SHARE * allowed + _SLACK_NBYTES:
            return
        self._watches = False
        warnings.warn(
            f"PyTorch's allocator has reserved {format_nbytes(more)} of {handle.device} for a budget of "
            f"{format_nbytes(allowed)}: pieces of memory that fit nothing, or that something else has left. Set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts; "
            f"torch.{handle.device.type}.empty_cache() gives back what is unused",
            stacklevel=2,
        )
