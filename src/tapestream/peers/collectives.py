"""`Collectives`: the operations of torch.distributed that ranks send tensors by, on whatever device these lie."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Group: TypeAlias = Any
"""A ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension."""


class Pending(Protocol):
    """An operation that has begun."""

    def wait(self) -> object:
        """Until what it brings is there, for what is issued from now on."""


class Collectives:
    """Of one process group. Where its backend knows only tensors of the CPU (gloo) while ours are on a GPU, they go
    through RAM."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Begin to bring every rank's ``part`` into ``whole``, by the name that this PyTorch has for it."""
        distributed = torch.distributed
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        return self._begun(gather, as_bytes(whole), as_bytes(part))

    def exchange(self, came: Tensor, sent: Tensor) -> Pending:
        """Begin to bring part ``rank`` of what every rank has ``sent`` into ``came``, one after the other."""
        return self._begun(torch.distributed.all_to_all_single, as_bytes(came), as_bytes(sent))

    def broadcast(self, tensor: Tensor) -> None:
        """Let this be that of the group's first rank."""
        first = torch.distributed.get_global_rank(self.group, 0)
        self._in_place(tensor, lambda there: torch.distributed.broadcast(there, first, group=self.group))

    def add(self, tensor: Tensor) -> None:
        """Add up those of all ranks, in no order that is known."""
        self._in_place(tensor, lambda there: torch.distributed.all_reduce(there, group=self.group))

    def largest(self, tensor: Tensor) -> None:
        """The largest of all ranks, number by number."""
        most = torch.distributed.ReduceOp.MAX
        self._in_place(tensor, lambda there: torch.distributed.all_reduce(there, most, group=self.group))

    def _begun(self, operation: Callable[..., Any], target: Tensor, source: Tensor) -> Pending:
        if not self._goes_through_ram(target):
            found: Pending = operation(target, source, group=self.group, async_op=True)
            return found
        there = torch.empty_like(target, device="cpu")
        return _ThroughRam(operation(there, source.cpu(), group=self.group, async_op=True), there, target)

    def _in_place(self, tensor: Tensor, operation: Callable[[Tensor], object]) -> None:
        if not self._goes_through_ram(tensor):
            operation(tensor)
            return
        there = tensor.cpu()
        operation(there)
        tensor.copy_(there)

    def _goes_through_ram(self, tensor: Tensor) -> bool:
        if tensor.is_cpu:
            return False
        backends = dict(one.split(":") for one in torch.distributed.get_backend_config(self.group).split(","))
        return backends.get(tensor.device.type) in (None, "gloo")


class _ThroughRam:
    def __init__(self, pending: Pending, there: Tensor, target: Tensor) -> None:
        self._pending, self._there, self._target = pending, there, target

    def wait(self) -> None:
        """See `Pending`."""
        self._pending.wait()
        self._target.copy_(self._there)


def as_bytes(tensor: Tensor) -> Tensor:
    """As bytes: not every backend knows every dtype."""
    return tensor.view(torch.uint8)
