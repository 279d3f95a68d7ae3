"""`PageLockedMemory`: RAM that the device copies from and to while the host goes on, in slabs that are cut and reused.

To lock pages takes about as long as to fill them, and locked memory that lies idle is lost to everybody. So a piece
that is given back is joined with its neighbours and serves requests of any size; slabs that are wholly free and too
small for what is asked now are given up before another one is made.
"""

import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tapestream.accelerator.device import backend_of
from tapestream.accelerator.memory import page_lock, page_unlock
from tapestream.accelerator.streams import synchronize
from tapestream.errors import StorageError
from tapestream.storage.regions import Use, settle_uses
from tapestream.storage.slabs import UNIT, Room
from tapestream.storage.transfer import ALIGNMENT, aligned_empty, round_up, with_storage_of_its_own
from tapestream.units import format_nbytes

_GROWTH = 4  # a new slab is at least this part of all, so that there are never many
_LEAST_NBYTES = 2 * 2**20
_MOST_NBYTES = 256 * 2**20  # of what is locked beyond what was asked for


@dataclass(slots=True)
class _Late:
    """Bytes of a slab that copies of what lay there may still read or write."""

    start: int
    stop: int
    uses: dict[object, Use]


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    room: Room
    late: list[_Late] = field(default_factory=list)

    def take_over(self, start: int, stop: int) -> dict[object, Use]:
        """The last copy of each stream that touches these bytes; whoever takes them looks after it from now on."""
        found: dict[object, Use] = {}
        for late in self.late:
            if late.start < stop and start < late.stop:
                found |= {k: use for k, use in late.uses.items() if k not in found or use.number > found[k].number}
        self.late = [late for late in self.late if not start <= late.start < late.stop <= stop]
        return found


class PageLockedMemory:
    """Pieces of page-locked RAM for one device. ``refused``: the system has locked no pages when asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        backend = backend_of(device)
        assert backend is not None  # RAM that no device copies from needs no locked pages
        self._registers = backend.registers
        self._slabs: list[_Slab] = []
        self._taken: dict[int, _Slab] = {}  # by the address of a piece
        self._locked: set[int] = set()
        self.refused = False
        # Memory that goes back to malloc while still locked could never be locked again.
        self._process = os.getpid()
        self._unlock = weakref.finalize(self, _unlock, self._locked, device, self._process)
        self._unlock.atexit = False

    @property
    def total_nbytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def idle_nbytes(self) -> int:
        """Bytes of slabs that no piece takes."""
        return sum(slab.room.free_nbytes for slab in self._slabs)

    def has(self, piece: torch.Tensor) -> bool:
        """Whether it is a piece in use."""
        return piece.data_ptr() in self._taken

    def take(self, nbytes: int, room: int | None) -> tuple[torch.Tensor, dict[object, Use]] | None:
        """A piece of ``nbytes`` bytes from a multiple of 4096, and the copies of what lay there before.

        ``room``: bytes that slabs may take in all (None: any number). Where pieces in use leave no gap that is large
        enough, one more slab goes beyond it, and a warning says so. None where the system has refused to lock pages.
        """
        size = round_up(max(1, nbytes), UNIT)
        found = self._fitting(size)
        if found is None:
            self.trim(smaller_than=size)
            if self._grown(size, room) is None:
                return None
            found = self._fitting(size)
            assert found is not None
        slab, start = found
        # In a storage of its own: users of its neighbours do not count, and `Tensor.is_pinned` asks where it begins.
        piece = with_storage_of_its_own(slab.memory[start : start + nbytes])
        self._taken[piece.data_ptr()] = slab
        return piece, slab.take_over(start, start + size)

    def give_back(self, piece: torch.Tensor, uses: Mapping[object, Use]) -> None:
        """Take a piece back; ``uses``: copies from or to it that may not have happened."""
        slab = self._taken.pop(piece.data_ptr())
        start, size = piece.data_ptr() - slab.memory.data_ptr(), round_up(max(1, piece.numel()), UNIT)
        slab.room.give_back(start, size)
        slab.late = [late for late in slab.late if not all(use.happened() for use in late.uses.values())]
        if uses:
            slab.late.append(_Late(start, start + size, dict(uses)))

    def trim(self, *, smaller_than: int | None = None) -> None:
        """Give up slabs that are wholly free (and smaller than that), once copies from and to them have happened."""
        for slab in [slab for slab in self._slabs if slab.room.unused]:
            if smaller_than is None or slab.memory.numel() < smaller_than:
                self._drop(slab)
                self._slabs.remove(slab)

    def close(self, uses: Mapping[object, Use]) -> None:
        """Give up all slabs; views of them stay readable. ``uses``: copies of pieces in use."""
        if os.getpid() == self._process:
            settle_uses(uses)
        for slab in self._slabs:
            self._drop(slab)
        self._slabs.clear()
        self._taken.clear()

    def _fitting(self, size: int) -> tuple[_Slab, int] | None:
        """Where the first slab has room."""
        for slab in self._slabs:
            start = slab.room.take(size)
            if start is not None:
                return slab, start
        return None

    def _grown(self, size: int, room: int | None) -> _Slab | None:
        """One more slab, for several pieces like this one where there is room."""
        total = self.total_nbytes
        wanted = max(1, min(max(total // _GROWTH, _LEAST_NBYTES), size + _MOST_NBYTES) // size) * size
        if room is not None and total + wanted > room:
            self.trim()
            total = self.total_nbytes
            wanted = max(1, min(wanted, room - total) // size) * size
        slab = self._made(wanted)
        if slab is not None and room is not None and total + wanted > room + (len(self._taken) + 1) * UNIT:
            warnings.warn(
                f"page-locked memory takes {format_nbytes(total + wanted)}, but {format_nbytes(room)} of RAM are "
                f"allowed: {format_nbytes(self.idle_nbytes - size)} are free in gaps too small to use; lower the host "
                "budget by that much if RAM is short"
            )
        return slab

    def _made(self, nbytes: int) -> _Slab | None:
        try:
            # PyTorch's own pinned allocator rounds up to powers of two: nearly twice the memory for an unlucky size.
            memory = aligned_empty(nbytes) if self._registers else _pinned_empty(nbytes)
        except RuntimeError as error:  # torch has no narrower type for this on the CPU
            raise StorageError(
                f"asked for {format_nbytes(nbytes)} of page-locked RAM beside {format_nbytes(self.total_nbytes)}, and "
                f"was refused; a smaller host budget avoids this ({error})"
            ) from error
        if self._registers:
            code = page_lock(memory, self._device)
            if code:
                self.refused = True
                warnings.warn(
                    f"the system refused to page-lock {format_nbytes(nbytes)} (CUDA error {code}); going on with "
                    "pageable memory, so copies are slower; raise `ulimit -l` or lower the host budget"
                )
                return None
            self._locked.add(memory.data_ptr())
        slab = _Slab(memory, Room(nbytes))
        self._slabs.append(slab)
        return slab

    def _drop(self, slab: _Slab) -> None:
        if os.getpid() != self._process:  # a forked child has copies of the pages, which nobody has locked
            return
        for late in slab.late:
            settle_uses(late.uses)
        address = slab.memory.data_ptr()
        if address in self._locked:
            page_unlock(address, self._device)  # where it refuses, this is tried once more when nobody needs any slab
            self._locked.remove(address)


def _pinned_empty(nbytes: int) -> torch.Tensor:
    whole = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True, device="cpu")
    return whole.narrow(0, -whole.data_ptr() % ALIGNMENT, nbytes)


def _unlock(addresses: set[int], device: torch.device, process: int) -> None:
    if os.getpid() != process:
        return
    if addresses:
        synchronize(device)  # nobody has closed this: copies may be under way
    for address in addresses:
        page_unlock(address, device)
