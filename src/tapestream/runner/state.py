"""`State`: what passes from one stage to the next, as detached tensors plus the structure around them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tapestream.accelerator.memory import storage_nbytes
from tapestream.runner.trees import tree_flatten, tree_leaves

_LEAF = pytree.tree_structure(0)  # of a tree that is a single tensor, as most states are


@dataclass(frozen=True, slots=True)
class State:
    """A pytree of tensors taken apart.

    ``tensors``: each distinct tensor once, detached (a tensor that appears twice in the tree must stay one tensor,
    or the
    sums of its gradients would be made in another order). ``requires``: which of them carry a gradient.
    ``others``: leaves that are no tensors. ``slots``: per leaf, an index into ``tensors``, or ``~i`` for ``others[i]``.
    """

    tensors: tuple[torch.Tensor, ...]
    requires: tuple[bool, ...]
    others: tuple[Any, ...]
    slots: tuple[int, ...]
    spec: pytree.TreeSpec

    def tree(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The user's structure around ``tensors`` (one per entry of ``self.tensors``)."""
        if self.spec is _LEAF and self.slots == (0,):
            return tensors[0]
        leaves = [tensors[s] if s >= 0 else self.others[~s] for s in self.slots]
        return pytree.tree_unflatten(leaves, self.spec)

    def same_structure(self, other: "State") -> bool:
        """True when the two trees have equal shape (not equal tensors)."""
        return self.slots == other.slots and self.spec == other.spec

    @property
    def versions(self) -> tuple[int, ...]:
        """Version counters: they move when somebody changes a tensor in place."""
        return tuple(t._version for t in self.tensors)

    def signature(self) -> tuple[object, ...]:
        """Hashable: equal signatures may share a plan."""
        tensors = tuple((tuple(t.shape), t.dtype, t.device) for t in self.tensors)
        others = tuple((type(o).__name__, repr(o)) for o in self.others)
        return tensors, self.requires, others, self.slots, str(self.spec)


def take_apart(
    tree: Any, opens: Callable[[Any], bool] = lambda instance: True
) -> "tuple[State, tuple[torch.Tensor, ...]]":
    """The State of ``tree``, and its distinct tensors as they are (with their graph). ``opens``: see `tree_flatten`."""
    if type(tree) in (torch.Tensor, torch.nn.Parameter):
        return State((tree.detach(),), (tree.requires_grad,), (), (0,), _LEAF), (tree,)
    leaves, spec = tree_flatten(tree, opens)
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    number: dict[int, int] = {}
    slots = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in number:
                number[id(leaf)] = len(tensors)
                tensors.append(leaf)
            slots.append(number[id(leaf)])
        else:
            slots.append(~len(others))
            others.append(leaf)
    state = State(
        tuple(t.detach() for t in tensors),
        tuple(t.requires_grad for t in tensors),
        tuple(others),
        tuple(slots),
        spec,
    )
    return state, tuple(tensors)


def tensors_in(tree: Any) -> Sequence[torch.Tensor]:
    """The tensors of a tree, as they are."""
    if isinstance(tree, torch.Tensor):
        return (tree,)
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Distinct storages behind ``tensors``: address to bytes."""
    held = (part.untyped_storage() for t in tensors for part in parts_of(t))
    return {storage.data_ptr(): storage_nbytes(storage) for storage in held if storage.nbytes() > 0}


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with memory that one is made of; none where that is hidden (those of oneDNN, cotangents with
    ``is_grads_batched=True``), and of zeros that have none (tangents of what has no tangent)."""
    if tensor._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(tensor):
        return ()
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def of_parts(
    layout: torch.layout, shape: torch.Size, parts: Sequence[torch.Tensor], *, coalesced: bool
) -> torch.Tensor:
    """The sparse tensor that has these `parts_of`."""
    if layout is torch.sparse_coo:
        places, values = parts
        return torch.sparse_coo_tensor(places, values, shape, is_coalesced=coalesced, check_invariants=False)
    compressed, plain, values = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=layout, check_invariants=False)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several of its numbers may lie in one place, as those of an expanded one do."""
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same address modulo 64, on which the bits of some kernels depend."""
    source = tensor.detach()
    if overlaps(source) or source.numel() == 0 or source.layout is not torch.strided or source.is_quantized:
        return source.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    itemsize = source.element_size()
    shift = source.data_ptr() % 64
    if shift % itemsize:
        return source.clone()
    room = torch.empty(span + 128 // itemsize, dtype=source.dtype, device=source.device)
    skip = ((shift - room.data_ptr()) % 64) // itemsize
    copy = room.as_strided(source.shape, source.stride(), skip)
    copy.copy_(source)
    return copy
