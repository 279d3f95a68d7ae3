"""Memory of a program's tensors that something outside of torch has been shown, and may write into."""

import zlib
from collections.abc import Callable, Iterable, Set

import torch

from tapestream.storage.transfer import bytes_of

EXPOSING = frozenset(
    (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.untyped_storage,
     torch.Tensor.storage, torch.Tensor.data_ptr)
)  # fmt: skip
"""Calls that show it: NumPy, DLPack and what has its address write without a version that would tell."""


class Exposed:
    """By storage, a checksum of what it held when it was shown, or when an operation wrote into it last."""

    def __init__(self, storage_of: Callable[[torch.Tensor], int]) -> None:
        self._storage_of = storage_of
        self.sums: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """Its memory is shown now."""
        if tensor.layout is torch.strided and not tensor.is_meta:
            self.sums[self._storage_of(tensor)] = checksum(tensor)

    def note_written(self, tensors: Iterable[torch.Tensor], changed: Set[int]) -> None:
        """An operation has written into the storages ``changed``, which ``tensors`` show."""
        for tensor in tensors:
            if self._storage_of(tensor) in changed & self.sums.keys():
                self.note(tensor)

    def why_spoilt(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """Why nothing may be run again, where something else has written into what ``tensors`` show."""
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage in self.sums and self.sums[storage] != checksum(tensor):
                return (
                    f"the memory of a tensor of shape {tuple(tensor.shape)} was written into inside the program "
                    "through NumPy, DLPack, its storage or its address (only torch's own operations are traced)"
                )
        return None


_SET = torch.Tensor.set_  # as it is where programs do not hear of it


def checksum(tensor: torch.Tensor) -> int:
    """Of all the memory that it shows a part of."""
    whole = _SET(torch.empty(0, dtype=torch.uint8, device=tensor.device), tensor.untyped_storage())
    if whole.device.type == "cpu":
        return zlib.crc32(bytes_of(whole).data)
    words = whole[: len(whole) // 4 * 4].view(torch.int32)
    places = torch.arange(1, len(words) + 1, device=whole.device, dtype=torch.int32)
    return int((words * places).sum()) * 257 + int(whole[len(words) * 4 :].sum())
