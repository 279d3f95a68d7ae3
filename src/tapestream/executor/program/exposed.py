"""Memory of a program's tensors that something outside of torch has been shown, and may write into."""

import zlib

import torch

from tapestream.storage.transfer import bytes_of

EXPOSING = frozenset(
    (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, torch.Tensor.untyped_storage,
     torch.Tensor.storage, torch.Tensor.data_ptr)
)  # fmt: skip
"""Calls that show it: NumPy, DLPack and what has its address write without a version that would tell."""


class Exposed:
    """By storage, a checksum of what it held when it was shown, or when an operation wrote into it last."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = {}

    def __contains__(self, storage: int) -> bool:
        return storage in self._sums

    def __bool__(self) -> bool:
        return bool(self._sums)

    def note(self, storage: int, tensor: torch.Tensor) -> None:
        """``tensor`` shows the storage as it may be."""
        if tensor.layout is torch.strided and not tensor.is_meta:
            self._sums[storage] = _checksum(tensor)

    def written(self, storage: int, tensor: torch.Tensor) -> bool:
        """Whether something else has written into it."""
        return storage in self._sums and self._sums[storage] != _checksum(tensor)


def _checksum(tensor: torch.Tensor) -> int:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if whole.device.type == "cpu":
        return zlib.crc32(bytes_of(whole).data)
    words = whole[: len(whole) // 4 * 4].view(torch.int32)
    places = torch.arange(1, len(words) + 1, device=whole.device, dtype=torch.int32)
    return int((words * places).sum()) * 257 + int(whole[len(words) * 4 :].sum())
