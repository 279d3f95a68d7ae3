"""`Peers`: which ranks train a streamed model together, and how their gradients are added."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from tapestream.errors import InputError
from tapestream.peers.agreement import Agreement, differing
from tapestream.peers.collectives import Group

_WAYS = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of ``group`` (a process group, or a DeviceMesh of one dimension; None: the default group) train one
    model, each on a batch of its own. After each backward, ``.grad`` has the sum over ranks.

    ``gradients``: "mean" multiplies each rank's gradient by 1/N before it is added, as DistributedDataParallel does;
    "sum" does not. They are added in the order of ranks, micro-batch after micro-batch: the bits that one process
    accumulates that runs the same micro-batches in this order.

    ``shard``: of N ranks, each keeps 1/N of the bytes of blocks, of their gradients and of their optimizer's state
    below the device, and reads and writes no more than that (as FSDP2 and ZeRO-3 do); blocks are gathered on the device
    while they run. Else each has a copy of all. A number: of so many neighbouring ranks (those of a machine, say:
    ``shard=int(os.environ["LOCAL_WORLD_SIZE"])``) each keeps that part, and other ranks have copies; gradients are
    added within these first, then over them.
    """

    group: Group | None = None
    gradients: Literal["mean", "sum"] = "mean"
    shard: bool | int = False

    def __post_init__(self) -> None:
        if self.gradients not in _WAYS:
            raise InputError(f"Peers(gradients={self.gradients!r}) was asked for; it is 'mean' or 'sum'")
        if not isinstance(self.shard, int) or self.shard < 0:
            raise InputError(
                f"Peers(shard={self.shard!r}) was asked for; it is True, or how many ranks divide one copy among them"
            )

    def among(self, ranks: int) -> int:
        """How many of so many ranks divide one copy; 1: each has its own. Raises InputError where these are no part of
        them."""
        if self.shard is True:
            return ranks
        if self.shard and ranks % self.shard:
            raise InputError(
                f"Peers(shard={self.shard}) was asked for, but {ranks} ranks do not come in groups of {self.shard}; "
                f"give a divisor of {ranks}, or start another number"
            )
        return self.shard or 1

    def joined(self, looks: Sequence[str]) -> Agreement | None:
        """The line to the others, None where this process is alone. ``looks``: what must be the same on every rank of
        the model. Raises InputError where it is not, on every rank, and without a process group."""
        found = Agreement.of(self.group)
        if found is None:
            return None
        mine = [f"gradients={self.gradients!r}", f"shard={self.shard!r}", *looks]
        digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
        if len(set(found.told("streamed a model", digest))) > 1:
            lines = zip_longest(*found.told("compared models", mine), fillvalue="nothing")
            raise differing("models that are trained together", next(one for one in lines if len(set(one)) > 1))
        return found
