"""`Agreement`: what the ranks of a group are about to do, told to each other before they do it."""

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tapestream.errors import InputError, StorageError, TapestreamError
from tapestream.peers.collectives import Collectives, Group

T = TypeVar("T")

_FEW, _HEAD = 512, 8  # bytes that are told at once, and those of them that say how many there are
_KNOWN: "weakref.WeakKeyDictionary[Group, Agreement]" = weakref.WeakKeyDictionary()
"""By group: making one is a collective operation itself."""


class Agreement:
    """A line beside a group's own, over which its ranks say what they begin.

    ``group``: what tensors are sent over, by its ``collectives``; ``rank``, ``size``: of this process in it.
    """

    _errors: list[TapestreamError] | None = None

    def __init__(self, group: Group) -> None:
        distributed = torch.distributed
        self.group, self.rank, self.size = group, distributed.get_rank(group), distributed.get_world_size(group)
        self.collectives = Collectives(group)
        self._among = {range(self.size): self.collectives}
        ranks = distributed.get_process_group_ranks(group)
        # Of its own, so that operations of other kinds never meet; gloo, so that none of its tensors is on a GPU.
        make = partial(distributed.new_group, ranks, _timeout_of(group), "gloo", use_local_synchronization=True)
        self._line = self.waited("made a group", make)
        self._number = 0
        # Kept: c10d may let go of what it has sent later than its memory is counted on.
        self._few = [torch.empty(_FEW, dtype=torch.uint8, device="cpu") for _ in range(1 + self.size)]

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
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(
                    f"a DeviceMesh of {group.ndim} dimensions was given as the group of ranks; name one of its "
                    f"dimensions: mesh[{(group.mesh_dim_names or ('name',))[0]!r}]"
                )
            group = group.get_group()
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise InputError("this process is not in the process group that was given; call it in the group's ranks")
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            raise InputError(f"the group of ranks is a process group or a DeviceMesh, not a {type(group).__name__}")
        found = distributed.group.WORLD if group is None else group
        if distributed.get_world_size(found) == 1:
            return None
        if found not in _KNOWN:
            _KNOWN[found] = cls(found)
        return _KNOWN[found]

    @property
    def told_nbytes(self) -> int:
        """Bytes of RAM that telling takes, all the time."""
        return _FEW * (1 + self.size)

    def among(self, ranks: range) -> Collectives:
        """The operations of some ranks of the group, this one among them; each of these must ask."""
        if ranks not in self._among:
            every = torch.distributed.get_process_group_ranks(self.group)
            backend = torch.distributed.get_backend_config(self.group)
            some, until = [every[rank] for rank in ranks], _timeout_of(self.group)
            make = partial(torch.distributed.new_group, some, until, backend, use_local_synchronization=True)
            self._among[ranks] = Collectives(self.waited("made a group", make))
        return self._among[ranks]

    def told(self, what: str, document: Any) -> list[Any]:
        """Say that this rank ``what``, with a ``document`` (JSON), and hear what the others do: the documents by rank.
        Raises InputError, on every rank, where one does something else, and StorageError as `waited`."""
        self._number += 1
        mine = json.dumps([what, self._number, document], separators=(",", ":")).encode()
        every = [json.loads(one) for one in self._gathered(what, mine)]
        if len({(kind, number) for kind, number, _ in every}) > 1:
            others = ", ".join(f"rank {rank} {kind} (number {number})" for rank, (kind, number, _) in enumerate(every))
            text = f"ranks do different things: {others}; every rank must make the same calls, in order"
            raise self._noted(InputError(text))
        return [found for _, _, found in every]

    def agree(self, what: str, document: Any) -> None:
        """Say the same as every other rank. Raises as `told`, and InputError, on every rank, where documents differ."""
        every = self.told(what, document)
        if any(one != every[0] for one in every):
            raise self._noted(differing(f"ranks {what}, and what they came with does", every))

    def least(self, what: str, number: int) -> int:
        """The least that any rank says. Raises as `told`."""
        return int(min(self.told(what, number)))

    def same(self, tensors: Iterable[Tensor], device: torch.device, source: int = 0) -> None:
        """Let these be rank ``source``'s on every rank, one by one by way of ``device``. Raises StorageError."""
        for tensor in tensors:
            there = tensor.detach().to(device).contiguous()
            as_words = there.view(-1).view(torch.uint8) if there.numel() else None
            if as_words is not None:
                send = partial(self.collectives.broadcast, as_words, source)
                self.waited("made a model the same on every rank", send)
                if self.rank != source:
                    with torch.no_grad():
                        tensor.detach().copy_(there.view(tensor.shape))

    def waited(self, what: str, wait: Callable[[], T]) -> T:
        """Raise StorageError where not all ranks have come to ``what`` within the group's timeout, or one has died, and
        InputError where the group is no more."""
        try:
            return wait()
        except (RuntimeError, ValueError) as error:  # c10d has no narrower type for it
            if not self._is_there():
                text = (
                    f"a rank {what}, but the process group that its model was given to is gone "
                    "(destroy_process_group()): stream the model anew in the group that there is now, with peers= "
                    "again; what the ranks had divided is in their last save"
                )
                raise self._noted(InputError(text)) from None
            if isinstance(error, ValueError):
                raise
            text = (
                f"rank {self.rank} of {self.size} {what}, and not every rank came: one has ended, or makes other calls "
                f"(each rank needs as many); c10d says: {str(error).splitlines()[0]}"
            )
            raise self._noted(StorageError(text)) from error

    def _is_there(self) -> bool:
        """Whether the process group is the one that there was, not destroyed meanwhile."""
        try:
            torch.distributed.get_process_group_ranks(self.group)
            return bool(torch.distributed.get_rank(self.group) == self.rank)
        except (RuntimeError, ValueError, KeyError):
            return False

    @contextmanager
    def noting(self) -> Iterator[list[TapestreamError]]:
        """Inside, what is raised here is listed, too, for a caller who has code of others in between."""
        self._errors = found = list[TapestreamError]()
        try:
            yield found
        finally:
            self._errors = None  # errors hold the frames that they have passed through

    def _noted(self, error: TapestreamError) -> TapestreamError:
        if self._errors is not None:
            self._errors.append(error)
        return error

    def _gathered(self, what: str, mine: bytes) -> list[bytes]:
        """Bytes of every rank: at once where they are few. What comes first has one size, whatever is told: gloo ends
        the process where sizes differ."""
        length = len(mine).to_bytes(_HEAD, "little")
        first = self._gathered_of(what, length + mine[: _FEW - _HEAD], _FEW)
        lengths = [int.from_bytes(one[:_HEAD], "little") for one in first]
        rest = max(lengths) + _HEAD - _FEW
        more = self._gathered_of(what, mine[_FEW - _HEAD :], rest) if rest > 0 else [b""] * self.size
        whole = (one[_HEAD:] + other for one, other in zip(first, more, strict=True))
        return [one[:length] for one, length in zip(whole, lengths, strict=True)]

    def _gathered_of(self, what: str, mine: bytes, nbytes: int) -> list[bytes]:
        given = torch.frombuffer(bytearray(mine.ljust(nbytes, b" ")), dtype=torch.uint8)
        if nbytes == _FEW:
            own, *every = self._few
            own.copy_(given)
        else:
            own, every = given, [torch.empty_like(given) for _ in range(self.size)]
        self.waited(what, lambda: torch.distributed.all_gather(every, own, group=self._line))
        return [one.numpy().tobytes() for one in every]


def _timeout_of(group: Group) -> timedelta | None:
    """How long the group's own operations wait, None where it does not say."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and hasattr(options, "_timeout"):
            found: timedelta = options._timeout
            return found
    return None


def differing(what: str, found: Sequence[Any]) -> InputError:
    """Ranks have given different things where they must not."""
    said = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
    return InputError(f"{what} differ between ranks: {said}; every rank must give the same")
