"""Values of a program while they are alive."""

import weakref

import torch


class Ref(weakref.ref[torch.Tensor]):
    """A value that is alive."""

    __slots__ = ("id", "storage", "value")
    id: int
    value: int
    storage: int


def address_of(tensor: torch.Tensor) -> int:
    """What tells storages that are alive at the same time apart; a negative number where there is none."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return int(tensor.untyped_storage()._cdata)
