"""`Layout`: where the tensors of one block start inside its bytes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tapestream.errors import InputError
from tapestream.storage.transfer import ALIGNMENT, round_up

# PyTorch's kernels choose by address (a float32 `linear` differs at 4- or 8-byte offsets); this is what its CUDA
# allocator aligns to, so tensors in a block see the kernels that tensors of their own would.
TENSOR_ALIGNMENT = 512


def unit_nbytes(*, moves: bool) -> int:
    """What the bytes of a parameter block are a multiple of: pages, where it ``moves`` between tiers."""
    return ALIGNMENT if moves else TENSOR_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Layout:
    """``offsets`` in bytes (multiples of 512) of tensors of these shapes and dtypes; ``nbytes`` with what fills up the
    last unit that is moved."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[Sequence[int], torch.dtype]], unit: int = ALIGNMENT) -> "Layout":
        """Lay (shape, dtype) pairs out one after the other; ``nbytes`` is a multiple of ``unit``."""
        shapes, dtypes, offsets, end = [], [], [], 0
        for shape, dtype in tensors:
            shapes.append(tuple(shape))
            dtypes.append(dtype)
            offsets.append(round_up(end, TENSOR_ALIGNMENT))
            end = offsets[-1] + math.prod(shape) * dtype.itemsize
        return cls(tuple(shapes), tuple(dtypes), tuple(offsets), round_up(end, unit))

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Contiguous tensors that share the bytes of ``memory``, a uint8 tensor of at least ``nbytes`` elements.

        Raises InputError when it is something else or too short.
        """
        if memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < self.nbytes:
            raise InputError(
                f"this layout needs a one-dimensional uint8 tensor of at least {self.nbytes} elements, "
                f"not {memory.dtype} of shape {tuple(memory.shape)}"
            )
        return [
            memory.narrow(0, offset, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
        ]

    def within(self, first: int, last: int) -> dict[int, tuple[int, int]]:
        """By number of a tensor, which of its elements, from one to another, lie in bytes ``first`` to ``last``, both
        multiples of every width of element; those of which none do are left out."""
        found = {}
        for number, (shape, dtype, offset) in enumerate(zip(self.shapes, self.dtypes, self.offsets, strict=True)):
            start, stop = max(first, offset), min(last, offset + math.prod(shape) * dtype.itemsize)
            if start < stop:
                found[number] = (start - offset) // dtype.itemsize, (stop - offset) // dtype.itemsize
        return found


def in_memory_order(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The elements of ``tensor`` in one dimension, in the order in which a dense tensor of these strides holds them: a
    view where ``tensor`` holds them so, a copy elsewhere."""
    order = sorted(range(tensor.dim()), key=lambda d: (-stride[d], d))
    return tensor.permute(order).reshape(-1)
