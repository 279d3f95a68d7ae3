"""Parcels: states on their way between tiers, storage by storage, so that views and shared storages survive."""

from dataclasses import dataclass, replace

import torch

from tapestream.errors import ScheduleError
from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.ir.actions import Tier, Value
from tapestream.runner.state import State
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region


@dataclass(frozen=True, slots=True)
class _View:
    """One tensor of a state as a window on one of its storages."""

    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Parcel:
    state: State  # without its tensors
    views: list[_View]
    copies: dict[Tier, list[Region]]
    tickets: dict[Tier, list[Ticket]]


class Parcels:
    """Owns the copies of states below the device.

    A DEVICE copy that comes back is a region of the pool and stays one until the interpreter frees the state;
    storages start at multiples of 64 bytes there as in PyTorch's own allocator, so every view has its old address
    modulo 64.
    """

    def __init__(self, pool: Pool, engine: CopyEngine) -> None:
        self._pool, self._engine = pool, engine
        self._parcels: dict[Value, _Parcel] = {}

    def pack(self, value: Value, state: State) -> None:
        """Make the storages of ``state``, on the device, the parcel's DEVICE copy."""
        number: dict[int, int] = {}
        regions: list[Region] = []
        views: list[_View] = []
        for tensor in state.tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in number:
                number[storage.data_ptr()] = len(regions)
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                regions.append(Region(Tier.DEVICE, storage.nbytes(), whole))
            views.append(
                _View(
                    number[storage.data_ptr()],
                    int(tensor.storage_offset()),
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                )
            )
        known = self._parcels.get(value)
        copies = dict(known.copies) if known else {}
        copies[Tier.DEVICE] = regions
        self._parcels[value] = _Parcel(replace(state, tensors=()), views, copies, {})

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying every storage of the parcel."""
        parcel = self._parcels[value]
        sources = parcel.copies[source]
        targets = parcel.copies.get(target) or [self._pool.allocate(target, r.nbytes) for r in sources]
        parcel.copies[target] = targets
        parcel.tickets[target] = [self._engine.copy(a, b) for a, b in zip(sources, targets, strict=True)]

    def wait(self, value: Value, tier: Tier) -> None:
        """Until the copies into ``tier`` have ended."""
        parcel = self._parcels[value]
        for ticket in parcel.tickets.pop(tier):
            self._engine.wait(ticket)
        if tier is not Tier.DEVICE:
            parcel.copies.pop(Tier.DEVICE, None)  # the state itself keeps those bytes

    def unpack(self, value: Value) -> State:
        """The state over the DEVICE copy; the bytes go when its tensors go."""
        parcel = self._parcels[value]
        regions = parcel.copies.pop(Tier.DEVICE)
        tensors = []
        for view in parcel.views:
            storage = regions[view.storage].memory
            whole = storage[: storage.nbytes // view.dtype.itemsize * view.dtype.itemsize].view(view.dtype)
            tensors.append(whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset))
        for region in regions:
            self._pool.forget(region)
        return replace(parcel.state, tensors=tuple(tensors))

    def free(self, value: Value, tier: Tier) -> None:
        """Drop the copy in ``tier``."""
        parcel = self._parcels.get(value)
        if parcel is None or tier not in parcel.copies:
            raise ScheduleError(f"the executor has no copy of {value} in {tier.name} to free")
        for region in parcel.copies.pop(tier):
            self._engine.release(region)
            self._pool.release(region)
        if not parcel.copies:
            del self._parcels[value]

    def close(self) -> None:
        """Drop everything that is left (after an exception, or a call that nobody differentiated)."""
        for value in list(self._parcels):
            for tier in list(self._parcels[value].copies):
                if tier is Tier.DEVICE:
                    self._parcels[value].copies.pop(tier)
                else:
                    self.free(value, tier)
            self._parcels.pop(value, None)
