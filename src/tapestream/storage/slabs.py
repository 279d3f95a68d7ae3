"""`Slab`: one open file with room for many extents: making, opening and removing a file for each would cost more than
moving the bytes of a small one."""

import mmap
import os
import weakref
from bisect import bisect
from pathlib import Path

from tapestream.storage.transfer import ALIGNMENT, round_up

SMALL_NBYTES = 4 * 2**20
"""Extents of more than this have files of their own."""
_LEAST_NBYTES, _DOUBLING_NBYTES = 2**20, 64 * 2**20
UNIT = max(ALIGNMENT, mmap.ALLOCATIONGRANULARITY)
"""What mappings begin at, and direct transfers."""


class Room:
    """The numbers below ``nbytes``, handed out as runs of whole pages, first fit."""

    __slots__ = ("_holes", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._holes = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` bytes are from now on the caller's; None where no hole is large enough."""
        wanted = round_up(nbytes, UNIT)
        for number, (start, stop) in enumerate(self._holes):
            if stop - start >= wanted:
                self._holes[number : number + 1] = [(start + wanted, stop)] if stop - start > wanted else []
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Take back what `take` gave."""
        stop = start + round_up(nbytes, UNIT)
        at = bisect(self._holes, (start, stop))
        if at < len(self._holes) and self._holes[at][0] == stop:
            stop = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            at -= 1
            start = self._holes.pop(at)[0]
        self._holes.insert(at, (start, stop))

    @property
    def free_nbytes(self) -> int:
        """How many are nobody's."""
        return sum(stop - start for start, stop in self._holes)

    @property
    def unused(self) -> bool:
        """Whether all has been given back."""
        return self._holes == [(0, self.nbytes)]


class Slab:
    """``nbytes`` bytes of the open file ``file``, None where each transfer opens it: those through the page cache do.

    The descriptor is closed when the last that refers to the slab is gone, never before: a transfer that is under way
    must not find another file behind its number. ``closed``: the folder is gone, so nothing more may be moved.
    """

    __slots__ = ("__weakref__", "closed", "file", "path", "room")

    def __init__(self, path: Path, file: int | None, nbytes: int) -> None:
        self.path, self.file, self.closed, self.room = path, file, False, Room(nbytes)
        if file is not None:
            weakref.finalize(self, os.close, file).atexit = False


def slab_nbytes(nbytes: int, held: int, free: int) -> int:
    """Bytes of a new slab for an extent of ``nbytes``, beside ``held`` in slabs and ``free`` on the disk: as much as
    there is already, and a quarter of it from 256 MiB on: files are few, as each keeps a descriptor."""
    grown = max(_LEAST_NBYTES, min(held, _DOUBLING_NBYTES), held // 4)
    return round_up(max(nbytes, min(grown, free // 4)), UNIT)
