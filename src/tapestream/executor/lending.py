"""Saved-tensor hooks for streamed parameters: a saved view of a block's bytes is kept as a place, not as bytes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tapestream.errors import GradientError
from tapestream.executor.blocks import BlockStore
from tapestream.ir.actions import Tier, Value
from tapestream.runner.guards import Pack, Unpack, Watch, written_since_saved
from tapestream.runner.state import of_parts, parts_of


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor inside a block's ``value``, ``offset`` bytes from its start."""

    value: Value
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    lent: ClassVar[bool] = True


@dataclass(slots=True)
class _Saved:
    """A tensor that stays where it is. ``lent``: it is a parameter's, or a view of one."""

    tensor: torch.Tensor
    version: int
    lent: bool


@dataclass(slots=True)
class _Sparse:
    """A sparse tensor, some parts of which are a parameter's."""

    layout: torch.layout
    shape: torch.Size
    coalesced: bool
    parts: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, parts: tuple[Any, ...]) -> "_Sparse":
        """With ``parts`` packed."""
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return cls(tensor.layout, tensor.shape, coalesced, parts)


def lending_hooks(
    store: BlockStore, block: int | None, name: str, watch: Watch, others: tuple[Pack, Unpack] | None = None
) -> tuple[Pack, Unpack]:
    """Hooks under which a stage that uses ``block`` is recorded.

    Its parameters may leave the device between Record and Backward, unless that is their home; Backward finds them
    wherever they came back to. What else it saves goes through ``others``, if there are such hooks.
    Hooks switch autograd's own check of version counters off, so both kinds are checked here. ``watch`` is open while
    they may be asked: what a stage leaves in objects must not be differentiated from outside.
    """
    # By address of the storage, with the address of the first byte. Numbers only: every saved tensor keeps these two
    # functions alive, and they must not keep the block's bytes.
    known: dict[int, tuple[Value, int]] = {}
    for value in () if block is None else store.copies.shown_values(block):
        region = store.copies.regions.get((value, Tier.DEVICE))
        if region is not None:
            known[region.memory.untyped_storage().data_ptr()] = value, region.memory.data_ptr()
    region, stay = None, store.home is Tier.DEVICE
    lent = 0 if block is None else store.version(block)

    def pack(tensor: torch.Tensor) -> Any:
        found = None
        if tensor.layout is torch.strided:
            found = known.get(tensor.untyped_storage().data_ptr()) if known else None
        elif any(part.untyped_storage().data_ptr() in known for part in parts_of(tensor.detach())):
            return _Sparse.of(tensor, tuple(map(pack, parts_of(tensor.detach()))))
        if found is None and others is not None:
            return others[0](tensor)
        if found is None or stay:  # detached: an output would hold the node that saves it
            return _Saved(tensor.detach(), tensor._version, found is not None)
        value, start = found
        first = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize  # also without elements
        return _Place(value, int(first) - start, tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(saved: Any) -> torch.Tensor:
        watch.check(name)
        if isinstance(saved, _Sparse):
            parts = list(map(unpack, saved.parts))
            return of_parts(saved.layout, saved.shape, parts, coalesced=saved.coalesced)
        if not isinstance(saved, (_Saved, _Place)):
            assert others is not None
            return others[1](saved)
        written = isinstance(saved, _Saved) and saved.tensor._version != saved.version
        if written and not saved.lent:
            raise written_since_saved(name)
        if written or (saved.lent and block is not None and store.version(block) != lent):
            raise GradientError(
                f"the parameters of {name} were changed after this forward, so its gradient would be that of "
                "other weights; "
                "call backward() before the update, or run the forward again"
            )
        if isinstance(saved, _Saved):
            return saved.tensor
        home = store.copies.regions[saved.value, Tier.DEVICE].memory
        first = home.storage_offset() + saved.offset
        return torch.empty(0, dtype=saved.dtype, device=home.device).set_(
            home.untyped_storage(), first // saved.dtype.itemsize, saved.shape, saved.stride
        )

    return pack, unpack
