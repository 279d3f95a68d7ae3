"""A call like one that is known, of another size: the longest one that will come, said by its shape alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tapestream.errors import InputError
from tapestream.frontends.given import Arguments, arguments_of
from tapestream.runner.private import tensors_in


def shape_in(batch: Any) -> tuple[int, ...] | None:
    """The shape that was given in place of a batch: a torch.Size, or whole numbers in a tuple or list. None: it is a
    batch."""
    if not isinstance(batch, (tuple, list)) or not batch:
        return None
    return tuple(batch) if all(type(size) is int for size in batch) else None


def longest_of(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of the longest call: those in ``batch``, or if it is a shape those of the call that is given, made
    as large. Raises InputError where they hold no tensor, and for a shape that the call cannot have."""
    shape = shape_in(batch)
    found = arguments_of(batch) if shape is None else resized(args, kwargs, shape)
    if not tensors_in([found]):
        raise InputError(
            f"longest={batch!r} holds no tensor; give the arguments of the longest call, as ts.plan takes them, or the "
            "shape of its first tensor, such as (8, 4096)"
        )
    return found


def resized(args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]) -> Arguments:
    """The call with a first tensor of ``shape``. Every tensor that has a size of the first one in the same dimension
    gets the new one: labels and masks become as long as tokens. What is in them is repeated, so that it stays valid.

    Raises InputError where the first tensor has another number of dimensions, or nothing in it to be repeated.
    """
    first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() != len(shape) or min(shape) < 1 or first.numel() == 0:
        has = "it has no tensor" if first is None else f"its first tensor has the shape {tuple(first.shape)}"
        raise InputError(
            f"longest={tuple(shape)} was given for a call, but {has}; give a size of 1 or more for each dimension of "
            "the first tensor, or the longest batch itself"
        )
    sizes = list(zip(first.shape, shape, strict=True))
    found: Arguments = pytree.tree_map_only(torch.Tensor, partial(_resized, sizes=sizes), (args, kwargs))
    return found


def _resized(tensor: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    found = tensor.detach()
    for dim, (old, new) in enumerate(sizes[: tensor.dim()]):
        if tensor.shape[dim] == old != new:
            found = found.index_select(dim, torch.arange(new, device=tensor.device) % old)
    return tensor if found.shape == tensor.shape else found.requires_grad_(tensor.requires_grad)
