"""`Agreement`: what the ranks of a group are about to do, told to each other before they do it."""

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from tapestream.errors import InputError, StorageError

Group: TypeAlias = Any
"""A ``torch.distributed.ProcessGroup``, or a ``DeviceMesh`` of one dimension."""
T = TypeVar("T")

_CPU = torch.device("cpu")
_KNOWN: "weakref.WeakKeyDictionary[Group, Agreement]" = weakref.WeakKeyDictionary()
"""By group: making one is a collective operation itself."""


class Agreement:
    """A line beside a group's own, over which its ranks say what they begin.

    ``group``: what tensors are sent over; ``rank``, ``size``: of this process in it.
    """

    def __init__(self, group: Group) -> None:
        distributed = torch.distributed
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        ranks = distributed.get_process_group_ranks(group)
        # Of its own, so that operations of other kinds never meet; gloo, so that none of its tensors is on a GPU.
        self._line = self.waited(
            "made a group", lambda: distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        )
        self._number = 0

    @classmethod
    def of(cls, group: Group | None) -> "Agreement | None":
        """That of a group (None: the default one), None where this process is alone in it.

        Raises InputError where there is none, and where this process is not in it.
        """
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise InputError(
                "ranks were to do something together, but there is no process group; start each with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        if group is not None and hasattr(group, "get_group"):
            group = group.get_group()
        found = distributed.group.WORLD if group is None else group
        if distributed.get_rank(found) < 0:
            raise InputError("this process is not in the process group that was given; call it in the group's ranks")
        if distributed.get_world_size(found) == 1:
            return None
        if found not in _KNOWN:
            _KNOWN[found] = cls(found)
        return _KNOWN[found]

    def told(self, what: str, document: Any) -> list[Any]:
        """Say that this rank begins ``what``, with a ``document`` (JSON), and hear what the others begin: the documents
        by rank. Raises InputError, on every rank, where one begins something else, and StorageError as `waited`."""
        self._number += 1
        mine = torch.frombuffer(bytearray(json.dumps([what, self._number, document]).encode()), dtype=torch.uint8)
        every = [json.loads(bytes(one.tolist())) for one in self._gathered(what, mine)]
        if len({(kind, number) for kind, number, _ in every}) > 1:
            others = ", ".join(f"rank {rank} {kind} (number {number})" for rank, (kind, number, _) in enumerate(every))
            raise InputError(f"ranks began different things: {others}; every rank must make the same calls, in order")
        return [found for _, _, found in every]

    def waited(self, what: str, wait: Callable[[], T]) -> T:
        """Raise StorageError where not all ranks have come to ``what`` within the group's timeout, or one has died."""
        try:
            return wait()
        except RuntimeError as error:  # c10d has no narrower type for it
            raise StorageError(
                f"rank {self.rank} of {self.size} {what}, and not every rank came: one has ended, or makes other calls "
                f"(each rank needs as many); c10d says: {str(error).splitlines()[0]}"
            ) from error

    def _gathered(self, what: str, mine: Tensor) -> list[Tensor]:
        """Bytes of every rank, of different lengths."""
        gather = torch.distributed.all_gather
        sizes = [torch.zeros(1, dtype=torch.int64, device=_CPU) for _ in range(self.size)]
        length = torch.tensor([mine.numel()], dtype=torch.int64, device=_CPU)
        self.waited(what, lambda: gather(sizes, length, group=self._line))
        lengths = [int(one) for one in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=_CPU)
        padded[: mine.numel()] = mine
        every = [torch.zeros_like(padded) for _ in range(self.size)]
        self.waited(what, lambda: gather(every, padded, group=self._line))
        return [one[:length] for one, length in zip(every, lengths, strict=True)]


def differing(what: str, found: Sequence[Any]) -> InputError:
    """Ranks have given different things where they must not."""
    said = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
    return InputError(f"{what} differ between ranks: {said}; every rank must give the same")
