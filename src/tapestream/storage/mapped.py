"""Which bytes of which file a tensor shows."""

import mmap
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from tapestream.storage.disk import Extent

_FOUND: "weakref.WeakValueDictionary[int, Extent]" = weakref.WeakValueDictionary()


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping begins in memory."""
    return np.frombuffer(mapping, dtype=np.uint8).ctypes.data


def note(extent: "Extent", mapping: mmap.mmap) -> None:
    """``mapping`` is of this extent."""
    _FOUND[address_of(mapping)] = extent


def place_of(tensor: torch.Tensor) -> "tuple[Extent, int] | None":
    """The extent that a tensor, or one that it is a view of, was mapped from, and the byte where the tensor begins in
    it; None for a tensor that lies elsewhere."""
    if not tensor.is_cpu or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    start = tensor.untyped_storage().data_ptr()
    extent = _FOUND.get(start)
    if extent is None or extent.address != start:  # its mapping is gone, and something else has come there
        return None
    return extent, tensor.data_ptr() - start
