"""Parcels: states and saved tensors on their way between tiers."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import torch

from tapestream.errors import GradientError, ScheduleError, StorageError
from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.executor.travel.cargo import Cargo, Origin, Origins, Stays, has_storage, head_of
from tapestream.ir.actions import Tier, Value
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region
from tapestream.storage.transfer import landing_empty


@dataclass(slots=True)
class _Copy:
    """A copy under way; ``ticket`` is None when it has been waited for. Several parcels may wait for the same."""

    region: Region
    ticket: Ticket | None

    def finish(self, engine: CopyEngine) -> None:
        """Wait for it. Raises StorageError when it failed."""
        if self.ticket is not None:
            engine.wait(self.ticket)
            self.ticket = None


@dataclass(slots=True)
class _Parcel:
    """``copies``: per tier a region for each load; on the device, the bytes themselves where others hold them there
    already. ``under_way``: the copies into a tier that nobody has waited for."""

    cargo: Cargo
    copies: dict[Tier, list[Region | torch.Tensor]]
    under_way: dict[Tier, list[_Copy]] = field(default_factory=dict)


class Parcels:
    """Owns the copies of states and saved tensors below the device, and those on their way back to it.

    What has come back belongs to the tensors made over it; storages start at multiples of 64 bytes there as in
    PyTorch's own allocators, so every tensor has its old address modulo 64. ``stays`` says of a tensor that its bytes
    are not for us to move: the caller's arguments, say.
    """

    def __init__(self, pool: Pool, engine: CopyEngine, stays: Stays = lambda tensor, head: False) -> None:
        self._pool, self._engine, self.stays = pool, engine, stays
        self._parcels: dict[Value, _Parcel] = {}
        self._known: Origins = WeakValueDictionary()
        self._coming: dict[Origin, _Copy] = {}  # to the device: what several states share comes once

    def pack(self, value: Value, tensors: Sequence[torch.Tensor], stays: Stays | None = None) -> list[bool]:
        """Make what is behind ``tensors``, on the device, the value's DEVICE copy. Says of each whether it travels."""
        cargo, memories = Cargo.of(tensors, stays or self.stays, self._known)
        known = self._parcels.get(value)
        copies: dict[Tier, list[Region | torch.Tensor]] = {} if known is None else known.copies
        copies[Tier.DEVICE] = [Region(Tier.DEVICE, m.nbytes, m) for m in memories]
        self._parcels[value] = _Parcel(cargo, copies)
        return [not isinstance(window, torch.Tensor) for window in cargo.windows]

    def written(self, tensors: Iterable[torch.Tensor]) -> None:
        """Other bytes are about to be behind these: what is packed of them from now on is not what was before."""
        for tensor in tensors:
            if has_storage(tensor):
                self._known.pop(head_of(tensor), None)

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying. Raises StorageError or BudgetError where ``target`` is full."""
        parcel = self._parcels[value]
        under_way = parcel.under_way[target] = []
        targets = parcel.copies.setdefault(target, [])
        for load, region in enumerate(parcel.copies[source]):
            assert isinstance(region, Region)
            origin = parcel.cargo.alone(load) if target is Tier.DEVICE else None
            coming = None if origin is None else self._coming.get(origin)
            if coming is not None:
                targets.append(coming.region)
                under_way.append(coming)
                continue
            if load == len(targets):
                below = target is not Tier.DEVICE
                targets.append(self._pool.allocate(target, region.nbytes) if below else _landing(parcel.cargo, load))
            into = targets[load]
            if isinstance(into, Region):
                under_way.append(copy := _Copy(into, self._engine.copy(region, into)))
                if origin is not None:
                    self._coming[origin] = copy

    def wait(self, value: Value, tier: Tier) -> None:
        """Until the copies into ``tier`` have ended. Raises StorageError when one failed."""
        parcel = self._parcels[value]
        for copy in parcel.under_way[tier]:
            copy.finish(self._engine)
        del parcel.under_way[tier]
        if tier is not Tier.DEVICE:
            parcel.copies.pop(Tier.DEVICE, None)  # the tensors themselves keep those bytes

    def unpack(self, value: Value) -> tuple[torch.Tensor, ...]:
        """The tensors over the DEVICE copy, waited for; the bytes go when these go."""
        parcel = self._parcels[value]
        arrived = [self._unspoilt(parcel, load, it) for load, it in enumerate(parcel.copies.pop(Tier.DEVICE))]
        for origin in parcel.cargo.origins:
            self._coming.pop(origin, None)  # there from now on, see `Origin.living`
        tensors = parcel.cargo.unload([it.memory if isinstance(it, Region) else it for it in arrived])
        for it in arrived:
            if isinstance(it, Region):
                it.generation += 1  # the tensors' own from here on
        return tensors

    def _unspoilt(self, parcel: _Parcel, load: int, arrived: Region | torch.Tensor) -> Region | torch.Tensor:
        """What has arrived; once more, where another value showed it first and somebody has written into that."""
        origin = parcel.cargo.alone(load)
        memory = arrived.memory if isinstance(arrived, Region) else arrived
        if origin is None or not origin.spoilt(memory):
            return arrived
        below = parcel.copies[min(parcel.copies)][load]
        assert isinstance(below, Region)
        again = Region(Tier.DEVICE, below.nbytes, _empty(parcel.cargo, below.nbytes))
        self._engine.wait(self._engine.copy(below, again))
        return again

    def holds(self, value: Value) -> bool:
        """Whether there is a copy below the device."""
        return value in self._parcels

    def free(self, value: Value, tier: Tier) -> None:
        """Drop the copy in ``tier``. Raises ScheduleError where there is none."""
        parcel = self._parcels.get(value)
        if parcel is None or tier not in parcel.copies:
            raise ScheduleError(f"the executor has no copy of {value} in {tier.name} to free")
        for it in parcel.copies.pop(tier):
            if isinstance(it, Region):
                self._engine.release(it)
                self._pool.release(it)
        if not parcel.copies:
            del self._parcels[value]

    def drop(self, value: Value) -> None:
        """Drop every copy below the device, if there are any, whatever is under way."""
        parcel = self._parcels.pop(value, None)
        if parcel is None:
            return
        for origin in parcel.cargo.origins:
            self._coming.pop(origin, None)
        for copy in [copy for copies in parcel.under_way.values() for copy in copies]:
            with suppress(StorageError, GradientError):  # of a copy that nobody wants any more
                copy.finish(self._engine)
        for tier, copies in parcel.copies.items():
            for it in copies:
                if isinstance(it, Region) and tier is not Tier.DEVICE:
                    # One that a copy still uses which nobody knows of (Ctrl-C came as it began) stays with the pool.
                    with suppress(GradientError):
                        self._engine.release(it)
                        self._pool.release(it)

    def leave(self) -> None:
        """Nobody wants what is left any more: hold nothing on the device but what is being copied."""
        for parcel in self._parcels.values():
            parcel.cargo = replace(parcel.cargo, windows=())
            if not parcel.under_way:
                parcel.copies.pop(Tier.DEVICE, None)

    def close(self) -> None:
        """Drop everything that is left (after an exception, or a call that nobody differentiated)."""
        for value in list(self._parcels):
            self.drop(value)


def _landing(cargo: Cargo, load: int) -> Region | torch.Tensor:
    """Where a load comes back to: the device's memory where others hold it there, else new memory. That belongs to the
    tensors made over it, not to a pool.
    """
    origin = cargo.alone(load)
    living = None if origin is None else origin.living()
    if living is not None:
        return living
    nbytes = cargo.nbytes(load)
    return Region(Tier.DEVICE, nbytes, _empty(cargo, nbytes))


def _empty(cargo: Cargo, nbytes: int) -> torch.Tensor:
    if cargo.device.type == "cpu":
        return landing_empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=cargo.device)
