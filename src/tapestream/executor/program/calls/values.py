"""Values of a program while they are alive."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.errors import InputError


class Ref(weakref.ref[torch.Tensor]):
    """A value that is alive."""

    __slots__ = ("at", "id", "storage", "value", "version")
    id: int
    value: int
    storage: int
    version: int
    """When it was last seen, at operation ``at``."""
    at: int


def address_of(tensor: torch.Tensor) -> int:
    """What tells storages that are alive at the same time apart; a negative number where there is none."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        raise InputError(
            f"Program: a tensor of shape {tuple(tensor.shape)} has no memory of its own (inside torch.func.vmap, jvp "
            "and the like); wrap that call in a torch.autograd.Function, or write it without the transform"
        ) from None


def shows(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that show the same numbers of one memory."""
    layout = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    return address_of(tensor), tensor.dtype, tensor.shape, *layout


def written(seen: Iterable[tuple[weakref.ref[torch.Tensor], int]]) -> torch.Tensor | None:
    """The first of these tensors that lives and has another version than then."""
    living = ((ref(), version) for ref, version in seen)
    return next((tensor for tensor, version in living if tensor is not None and tensor._version != version), None)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes that count, as the device takes them: none of tensors without a storage."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.nbytes if tensor.is_cpu else tensor_nbytes(tensor)  # asked after every operation


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a leaf that requires a gradient."""
    return tensor.requires_grad and not tensor._is_view() and tensor.is_leaf
