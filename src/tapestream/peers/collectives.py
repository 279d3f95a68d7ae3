"""`Collectives`: the operations of torch.distributed that ranks send tensors by, on whatever device these lie."""

from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Group: TypeAlias = Any
"""A ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension."""

_LET_GO_SECONDS = 0.05


class Pending(Protocol):
    """An operation that has begun."""

    def wait(self) -> object:
        """Until what it brings is there, for what is issued from now on."""


class Collectives:
    """Of one process group. Where its backend knows only tensors of the CPU (gloo) while ours are on a GPU, they go
    through RAM."""

    def __init__(self, group: Group) -> None:
        self.group, self._ranks = group, torch.distributed.get_process_group_ranks(group)
        self._backends = dict(one.split(":") for one in torch.distributed.get_backend_config(group).split(","))

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Begin to bring every rank's ``part`` into ``whole``. By gloo one after the other: its own way takes as many
        bytes again."""
        return self._begun(self._gather, as_bytes(whole), as_bytes(part))

    def _gather(self, whole: Tensor, part: Tensor) -> Pending:
        distributed, size = torch.distributed, len(self._ranks)
        if not self._by_gloo(whole):
            gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
            found: Pending = gather(whole, part, group=self.group, async_op=True)
            return found
        rows = whole.view(size, -1)
        rows[distributed.get_rank(self.group)] = part
        send = partial(distributed.broadcast, group=self.group, async_op=True)

        def begin() -> list[Pending]:
            return [send(row, rank) for row, rank in zip(rows, self._ranks, strict=True)]

        return _Several(begin, whole)

    def exchange(self, came: Tensor, sent: Tensor) -> Pending:
        """Begin to bring part ``rank`` of what every rank has ``sent`` into ``came``, one after the other. By gloo from
        rank to rank: its own way is slower."""
        return self._begun(self._exchange, as_bytes(came), as_bytes(sent))

    def _exchange(self, came: Tensor, sent: Tensor) -> Pending:
        distributed, size = torch.distributed, len(self._ranks)
        if not self._by_gloo(came):
            found: Pending = distributed.all_to_all_single(came, sent, group=self.group, async_op=True)
            return found
        mine, theirs, own = sent.view(size, -1), came.view(size, -1), distributed.get_rank(self.group)
        theirs[own] = mine[own]
        others = [(own + step) % size for step in range(1, size)]

        def begin() -> list[Pending]:
            begun = [distributed.isend(mine[k], self._ranks[k], group=self.group) for k in others]
            begun += [distributed.irecv(theirs[k], self._ranks[k], group=self.group) for k in others]
            return [one for one in begun if one is not None]

        return _Several(begin, came, sent)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Let this be that of rank ``source`` of the group."""
        root = self._ranks[source]
        self._in_place(tensor, lambda there: torch.distributed.broadcast(there, root, group=self.group))

    def add(self, tensor: Tensor) -> None:
        """Add up those of all ranks, in no order that is known."""
        self._in_place(tensor, lambda there: torch.distributed.all_reduce(there, group=self.group))

    def largest(self, tensor: Tensor) -> None:
        """The largest of all ranks, number by number."""
        most = torch.distributed.ReduceOp.MAX
        self._in_place(tensor, lambda there: torch.distributed.all_reduce(there, most, group=self.group))

    def _begun(self, operation: Callable[[Tensor, Tensor], Pending], target: Tensor, source: Tensor) -> Pending:
        if not self._goes_through_ram(target):
            return operation(target, source)
        there = torch.empty_like(target, device="cpu")
        return _ThroughRam(operation(there, source.cpu()), there, target)

    def _in_place(self, tensor: Tensor, operation: Callable[[Tensor], object]) -> None:
        if not self._goes_through_ram(tensor):
            operation(tensor)
            return
        there = tensor.cpu()
        operation(there)
        tensor.copy_(there)

    def _goes_through_ram(self, tensor: Tensor) -> bool:
        return not tensor.is_cpu and self._by_gloo(tensor)

    def _by_gloo(self, tensor: Tensor) -> bool:
        return self._backends.get(tensor.device.type) in (None, "gloo")


class _Several:
    """``tensors``: what they use, which c10d may let go of a little later than it says that it is done: whoever waits
    counts on that memory."""

    def __init__(self, begin: Callable[[], list[Pending]], *tensors: Tensor) -> None:
        self._tensors = [(tensor, _uses(tensor)) for tensor in tensors]
        self._pending = begin()

    def wait(self) -> None:
        """See `Pending`."""
        while self._pending:
            self._pending.pop(0).wait()
        until = monotonic() + _LET_GO_SECONDS
        for tensor, before in self._tensors:
            while _uses(tensor) > before and monotonic() < until:
                sleep(1e-5)
        self._tensors.clear()


def _uses(tensor: Tensor) -> int:
    """Tensors over the same bytes."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


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
