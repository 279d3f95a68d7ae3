"""`Pool`: the one owner of regions, with limits and peaks per tier."""

import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.ir import Tier
from tapestream.storage.disk import DiskFolder
from tapestream.storage.regions import Region
from tapestream.storage.transfer import aligned_empty, lean_empty
from tapestream.units import format_nbytes


class Pool:
    """Hands out regions and takes them back.

    A released region waits for the next request of the same tier and size. While it waits it is not *held*: it is
    given up before the tier would pass its limit and, where compute shares the memory, before any region
    of another size is made, so that ``peak_nbytes`` is what the tier really took. ``limits`` are bytes per tier
    (None or absent: no limit). HOST regions are page-locked when ``pin``; pinning costs time, so they wait for reuse
    until the limit or `close`. ``folder`` holds the DISK regions and stays its owner's to close. ``beside``: a pool
    with the same limits; what both hold counts against them, and to ``peak_nbytes``. Thread-safe.
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
        self._pin = pin
        self._live: set[Region] = set()
        self._idle: dict[tuple[Tier, int], list[Region]] = {}
        self._held = dict.fromkeys(Tier, 0)
        self._kept = dict.fromkeys(Tier, 0)
        self._pinned: set[int] = set()
        self._closed = False
        self._all: weakref.WeakSet[Pool] = weakref.WeakSet() if beside is None else beside._all
        self._all.add(self)
        self._peak: dict[Tier, int] = dict.fromkeys(Tier, 0) if beside is None else beside._peak
        self._lock: threading.RLock = threading.RLock() if beside is None else beside._lock
        # Memory that goes back to malloc while still registered could never be page-locked again.
        self._unpin = weakref.finalize(self, _unregister, self._pinned)
        self._unpin.atexit = False

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
                waits = sum(pool._kept[tier] for pool in self._all)
                if limit is not None and held + waits + nbytes > limit:
                    self._trim_all(tier)
                elif self._shared_with_compute(tier):
                    self.trim(tier)
                try:
                    region = self._make(tier, nbytes)
                except StorageError:
                    if not any(pool._kept[tier] for pool in self._all):
                        raise
                    self._trim_all(tier)  # released regions of other sizes take room, too
                    region = self._make(tier, nbytes)
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
                "allowed; allow at least that much, and room for what else a step keeps there"
            )

    def release(self, region: Region) -> None:
        """Take a region back. Raises StorageError when it is not one of this pool's regions in use."""
        with self._lock:
            if region not in self._live:
                raise StorageError(f"{region} is not in use: it was released before or belongs to another pool")
            self._live.remove(region)
            self._held[region.tier] -= region.nbytes
            region.generation += 1
            if region.extent is not None and region.extent.mapped:
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
        if not self._idle:
            return
        tiers = [tier] if tier is not None else [one for one in Tier if self._shared_with_compute(one)]
        with self._lock:
            if Tier.HOST in tiers and self._pinned and self._kept[Tier.HOST]:
                torch.cuda.synchronize(self._device)  # the last copy from or to them may still be running
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

    def peak_nbytes(self, tier: Tier) -> int:
        """The most that `held_nbytes`, with the pools beside this, was since it was made or `reset_peak` called."""
        return self._peak[tier]

    def reset_peak(self) -> None:
        """Start peaks anew from what is held now."""
        with self._lock:
            self._peak.update({tier: sum(pool._held[tier] for pool in self._all) for tier in Tier})

    def close(self) -> None:
        """Give up every region, in use or not; views of them stay readable. May be called twice."""
        with self._lock:
            self._closed = True
            if self._pinned:
                torch.cuda.synchronize(self._device)
            for tier in Tier:
                self.trim(tier)
                self._held[tier] = 0
            for region in self._live:
                region.generation += 1
                self._drop(region)
            self._live.clear()

    def _shared_with_compute(self, tier: Tier) -> bool:
        return tier is Tier.DEVICE or (tier is Tier.HOST and not self._pin)

    def _make(self, tier: Tier, nbytes: int) -> Region:
        if tier is Tier.DISK:
            if self._folder is None:
                raise InputError(f"asked for {format_nbytes(nbytes)} on DISK, but no folder was given; pass folder=")
            return Region(tier, nbytes, extent=self._folder.allocate(nbytes))
        on_host = tier is Tier.HOST or self._device.type == "cpu"
        try:
            if tier is Tier.HOST and self._pin:
                tensor = aligned_empty(nbytes)  # a page can be locked for one region only
            elif on_host:
                tensor = lean_empty(nbytes)
            else:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:  # torch has no narrower type for this on the CPU
            raise StorageError(
                f"asked for {format_nbytes(nbytes)} in {tier.name} beside {format_nbytes(self._held[tier])} held, "
                f"and was refused; a smaller budget for {tier.name} avoids this ({error})"
            ) from error
        if tier is Tier.HOST and self._pin and nbytes:
            self._page_lock(tensor)
        return Region(tier, nbytes, tensor)

    def _page_lock(self, tensor: torch.Tensor) -> None:
        # torch's own pinned allocator rounds up to powers of two: nearly twice the memory for an unlucky size.
        code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))  # type: ignore[no-untyped-call]
        if code == 0:
            self._pinned.add(tensor.data_ptr())
            return
        self._pin = False
        with suppress(RuntimeError):  # CUDA would tell of this once more, at the next kernel, as if that had failed
            torch.zeros(1, device=self._device)
        warnings.warn(
            f"the system refused to page-lock {format_nbytes(tensor.nbytes)} (CUDA error {code}); going on with "
            "pageable memory, so copies are slower; raise `ulimit -l` or lower the host budget"
        )

    def _drop(self, region: Region) -> None:
        if region.extent is not None:
            region.extent.delete()
        elif region.tensor is not None and region.tensor.is_cpu and region.tensor.data_ptr() in self._pinned:
            self._pinned.remove(region.tensor.data_ptr())
            _unregister({region.tensor.data_ptr()})


def _unregister(addresses: set[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
