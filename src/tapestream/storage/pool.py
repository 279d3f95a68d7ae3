"""`Pool`: the one owner of regions, with limits and peaks per tier."""

import threading
import weakref
from collections.abc import Iterable, Mapping

import torch

from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.ir import MEMORIES, Tier
from tapestream.storage.disk import DiskFolder
from tapestream.storage.page_locked import PageLockedMemory
from tapestream.storage.regions import Region, Use
from tapestream.storage.transfer import lean_empty
from tapestream.units import format_nbytes


class Pool:
    """Hands out regions and takes them back.

    A released region waits for the next request of the same tier and size. While it waits it is not *held*: it is
    given up before the tier would pass its limit and, where compute shares the memory, before any region
    of another size is made, so that ``peak_nbytes`` is what the tier really took. ``limits`` are bytes per tier
    (None or absent: no limit). HOST regions are page-locked when ``pin``, and cut from slabs (`PageLockedMemory`),
    whose free bytes serve any size. ``folder`` holds the DISK regions and stays its owner's to close. ``beside``: a
    pool with the same limits; what both hold counts against them, and to ``peak_nbytes``. Thread-safe.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        folder: DiskFolder | None,
        limits: Mapping[Tier, int | None],
        pin: bool,
        beside: "Pool | None" = None,
    ) -> None:
        self._device = device
        self._folder = folder
        self._limits = dict(limits)
        self._locked = PageLockedMemory(device) if pin else None
        self._live: set[Region] = set()
        self._idle: dict[tuple[Tier, int], list[Region]] = {}
        self._held = dict.fromkeys(MEMORIES, 0)
        self._kept = dict.fromkeys(MEMORIES, 0)
        self._closed = False
        self._all: weakref.WeakSet[Pool] = weakref.WeakSet() if beside is None else beside._all
        self._all.add(self)
        self._peak: dict[Tier, int] = dict.fromkeys(MEMORIES, 0) if beside is None else beside._peak
        self._lock: threading.RLock = threading.RLock() if beside is None else beside._lock

    def allocate(self, tier: Tier, nbytes: int) -> Region:
        """A region of ``nbytes`` bytes whose content is undefined.

        Raises BudgetError over the tier's limit, StorageError when the tier itself is full, InputError for
        DISK without a folder.
        """
        with self._lock:
            held, limit = sum(pool._held[tier] for pool in self._all), self._limits.get(tier)
            if self._closed:
                raise StorageError(f"asked for {format_nbytes(nbytes)} in {tier.name} of a closed pool; make a new one")
            if limit is not None and held + nbytes > limit:
                raise BudgetError(
                    f"asked for {format_nbytes(nbytes)} ({nbytes} bytes) in {tier.name} where {held} bytes are held "
                    f"and {limit} allowed; a limit of {held + nbytes} bytes would do"
                )
            waiting = self._idle.get((tier, nbytes))
            if waiting:
                region = waiting.pop()
                self._kept[tier] -= nbytes
            else:
                waits = sum(pool._idle_nbytes(tier) for pool in self._all)
                if limit is not None and held + waits + nbytes > limit:
                    for pool in self._others() if self._cuts(tier) else self._all:
                        pool.trim(tier)
                elif self._shared_with_compute(tier):
                    self.trim(tier)
                room = None if limit is None else limit - sum(pool._total_nbytes(tier) for pool in self._others())
                try:
                    region = self._make(tier, nbytes, room)
                except StorageError:
                    if not any(pool._idle_nbytes(tier) for pool in self._all):
                        raise
                    self._trim_all(tier)  # released regions of other sizes take room, too
                    region = self._make(tier, nbytes, room)
            self._live.add(region)
            self._held[tier] += nbytes
            self._peak[tier] = max(self._peak[tier], held + nbytes)
            return region

    def check_room(self, tier: Tier, sizes: Iterable[int], what: str) -> None:
        """Raise BudgetError where ``what``, of these ``sizes`` in bytes, takes more in ``tier`` than its limit, before
        anything is allocated. Where there is none, ``sizes`` are not looked at."""
        limit = self._limits.get(tier)
        if limit is not None and (nbytes := sum(sizes)) > limit:
            raise BudgetError(
                f"{what} take {format_nbytes(nbytes)} ({nbytes} bytes) in {tier.name}, where {limit} bytes are "
                "allowed; allow at least that much, and room for all else that a step keeps there"
            )

    def release(self, region: Region) -> None:
        """Take a region back. Raises StorageError when it is not one of this pool's regions in use."""
        with self._lock:
            if region not in self._live:
                raise StorageError(f"{region} is not in use: it was released before or belongs to another pool")
            self._live.remove(region)
            self._held[region.tier] -= region.nbytes
            region.generation += 1
            if self._is_cut(region):
                self._give_back(region)
            elif region.extent is not None and region.extent.mapped:
                self._drop(region)  # someone still looks at these bytes: they must not change under them
            else:
                self._idle.setdefault((region.tier, region.nbytes), []).append(region)
                self._kept[region.tier] += region.nbytes

    def forget(self, region: Region) -> None:
        """Leave a DEVICE region to the tensors made over it: it no longer counts, and goes when they do.

        Raises StorageError when it is not one of this pool's DEVICE regions in use.
        """
        with self._lock:
            if region not in self._live or region.tier is not Tier.DEVICE:
                raise StorageError(f"{region} cannot be left to tensors: it is not a DEVICE region in use by this pool")
            self._live.remove(region)
            self._held[region.tier] -= region.nbytes
            region.generation += 1

    def trim(self, tier: Tier | None = None) -> None:
        """Give up the released regions of one tier, or (None) of those whose memory compute could use."""
        if self._cuts(tier):
            assert self._locked is not None
            with self._lock:
                self._locked.trim()
        if not self._idle:
            return
        tiers = [tier] if tier is not None else [one for one in MEMORIES if self._shared_with_compute(one)]
        with self._lock:
            for key in [key for key in self._idle if key[0] in tiers]:
                for region in self._idle.pop(key):
                    self._drop(region)
            for one in tiers:
                self._kept[one] = 0

    def _trim_all(self, tier: Tier) -> None:
        for pool in self._all:
            pool.trim(tier)

    def held_nbytes(self, tier: Tier) -> int:
        """Bytes of the regions in use."""
        return self._held[tier]

    def room_nbytes(self, tier: Tier) -> int | None:
        """Bytes that may be asked for beside those in use, None for no limit."""
        limit = self._limits.get(tier)
        return None if limit is None else limit - sum(pool._held[tier] for pool in self._all)

    def peak_nbytes(self, tier: Tier) -> int:
        """The most that `held_nbytes`, with the pools beside this, was since it was made or `reset_peak` called."""
        return self._peak[tier]

    def reset_peak(self) -> None:
        """Start peaks anew from what is held now."""
        with self._lock:
            self._peak.update({tier: sum(pool._held[tier] for pool in self._all) for tier in MEMORIES})

    def close(self) -> None:
        """Give up every region, in use or not; views of them stay readable. May be called twice."""
        with self._lock:
            self._closed = True
            for tier in MEMORIES:
                self.trim(tier)
                self._held[tier] = 0
            uses: dict[object, Use] = {}
            for region in self._live:
                region.generation += 1
                if self._is_cut(region):
                    uses |= {(region, key): use for key, use in region.uses.items()}
                else:
                    self._drop(region)
            self._live.clear()
            if self._locked is not None:
                self._locked.close(uses)

    def _others(self) -> list["Pool"]:
        return [pool for pool in self._all if pool is not self]

    def _cuts(self, tier: Tier | None) -> bool:
        """Whether regions of ``tier`` are cut from page-locked slabs."""
        return tier is Tier.HOST and self._locked is not None and not self._locked.refused

    def _is_cut(self, region: Region) -> bool:
        held = region.tier is Tier.HOST and self._locked is not None and region.nbytes
        return bool(held and self._locked is not None and self._locked.has(region.memory))

    def _give_back(self, region: Region) -> None:
        assert self._locked is not None
        self._locked.give_back(region.memory, region.uses)

    def _total_nbytes(self, tier: Tier) -> int:
        """Bytes that the tier's memory takes, regions and what lies idle."""
        if tier is Tier.HOST and self._locked is not None:
            return self._locked.total_nbytes
        return self._held[tier] + self._kept[tier]

    def _idle_nbytes(self, tier: Tier) -> int:
        cut = self._locked.idle_nbytes if tier is Tier.HOST and self._locked is not None else 0
        return self._kept[tier] + cut

    def _shared_with_compute(self, tier: Tier) -> bool:
        return tier is Tier.DEVICE or (tier is Tier.HOST and not self._cuts(tier))

    def _make(self, tier: Tier, nbytes: int, room: int | None) -> Region:
        if tier is Tier.DISK:
            if self._folder is None:
                raise InputError(f"asked for {format_nbytes(nbytes)} on DISK, but no folder was given; pass folder=")
            return Region(tier, nbytes, extent=self._folder.allocate(nbytes))
        on_host = tier is Tier.HOST or self._device.type == "cpu"
        try:
            if self._cuts(tier) and nbytes:
                assert self._locked is not None
                found = self._locked.take(nbytes, room)
                if found is not None:
                    return Region(tier, nbytes, found[0], uses=found[1])
            if on_host:
                tensor = lean_empty(nbytes)
            else:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch has no narrower type for this on the CPU
            raise StorageError(
                f"asked for {format_nbytes(nbytes)} in {tier.name} beside {format_nbytes(self._held[tier])} held, "
                f"and was refused; a smaller budget for {tier.name} avoids this ({error})"
            ) from error
        return Region(tier, nbytes, tensor)

    def _drop(self, region: Region) -> None:
        if region.extent is not None:
            region.extent.delete()
