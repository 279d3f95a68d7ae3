"""Arrays and buffers that operations are given: replays get copies, since the program may go on writing into them."""

import array
import copy
import ctypes
import mmap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from tapestream.executor.program.calls.exposed import checksum

BUFFERS = (numpy.ndarray, array.array, bytearray, memoryview, mmap.mmap, ctypes.Array)
"""What a program may go on writing into: each call gets a copy of its own."""
_COPIED = (numpy.ndarray, array.array, bytearray)
_WATCHED_NBYTES = 1 << 20


def copied(buffer: Any) -> Any:
    """Memory of its own that torch reads in the same way."""
    return copy.copy(buffer) if isinstance(buffer, _COPIED) else numpy.array(memoryview(buffer))


def buffers_in(values: Iterable[Any]) -> list[Any]:
    """Those among ``values``, and among what is in containers there."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, BUFFERS):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += buffers_in(value)
        elif isinstance(value, Mapping):
            found += buffers_in(value.values())
    return found


class Arrays:
    """Those that backward needs, each with a checksum: what an operation has saved of an array is the array itself, in
    plain PyTorch, and backward takes what is in it by then. So it is held here as long as there. ``met``: whether there
    were any."""

    def __init__(self) -> None:
        self.met = False
        self._given: list[tuple[Any, int]] = []
        self._shown: dict[int, tuple[torch.Tensor, int]] = {}
        self._outside: dict[int, list[tuple[torch.Tensor, int, int]]] = {}

    def given(self, buffers: Sequence[Any]) -> None:
        """An operation was given ``buffers``, and has saved something."""
        self._given += [(one, _checksum(one)) for one in buffers]

    def shown(self, storage: int, tensor: torch.Tensor) -> None:
        """An operation has made ``tensor``, over the memory of one."""
        self._shown[storage] = tensor.detach(), checksum(tensor)

    def outside(self, storage: int, tensor: torch.Tensor) -> None:
        """A tensor that no call showed is over memory of others: an argument, or made by a function that was taken out
        of torch under a name of its own before (``from torch import from_numpy``). Large ones would take too long."""
        self.met = True
        if tensor.untyped_storage().nbytes() <= _WATCHED_NBYTES:
            self._outside.setdefault(storage, []).append((tensor.detach(), tensor._version, checksum(tensor)))

    def written(self, storages: Iterable[int]) -> None:
        """Torch itself has written into ``storages``, of which versions tell, though not of running statistics."""
        for storage in storages:
            if storage in self._shown:
                tensor, _ = self._shown[storage]
                self._shown[storage] = tensor, checksum(tensor)
            if storage in self._outside:
                tensors = [tensor for tensor, _, _ in self._outside[storage]]
                self._outside[storage] = [(tensor, tensor._version, checksum(tensor)) for tensor in tensors]

    def settle(self, saved: Iterable[int]) -> None:
        """The program has ended: let go of what shows none of the storages ``saved``."""
        kept = self._shown.keys() & set(saved) if self._shown else ()
        self._shown = {storage: self._shown[storage] for storage in kept}

    def why_spoilt(self) -> str | None:
        """Why nothing may be run again, where one has changed since."""
        same = all(_checksum(one) == then for one, then in self._given)
        # What torch has written into since has another version, of which others tell.
        same = same and all(
            t._version != at or checksum(t) == then for found in self._outside.values() for t, at, then in found
        )
        if same and all(checksum(tensor) == then for tensor, then in self._shown.values()):
            return None
        return (
            "an array or buffer that an operation was given and that backward needs (an index, or memory that "
            "torch.from_numpy, as_tensor, frombuffer or DLPack shares) was written into afterwards"
        )


def _checksum(buffer: Any) -> int:
    return zlib.crc32(buffer.tobytes() if isinstance(buffer, numpy.ndarray) else memoryview(buffer).tobytes())
