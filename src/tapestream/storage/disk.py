"""Files as a memory tier: a locked folder of one run, and extents of bytes in it.

A large extent has a file of its own, opened for each transfer: that costs microseconds beside milliseconds, and takes
no descriptors from the program. Small ones share files that stay open, see `Slab`.
"""

import errno
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import torch

from tapestream.errors import InputError, StorageError
from tapestream.storage.kernel_queue import KernelQueue, Pending
from tapestream.storage.locked import dead_folders, locked_folder, owner_of, remove_dead, remove_locked
from tapestream.storage.mapped import address_of, note
from tapestream.storage.slabs import SMALL_NBYTES, Slab, slab_nbytes
from tapestream.storage.transfer import ALIGNMENT, SECTOR, bytes_of, move_bytes, round_up
from tapestream.system import files
from tapestream.system.locks import Lock
from tapestream.system.pages import own_pages
from tapestream.units import format_nbytes

PREFIX = "tapestream-"
"""How the names of runs' folders begin."""


class DiskFolder:
    """A folder of this run's own below ``path`` (made if missing), locked while it lives, removed by `close`.

    ``path`` of the object is that folder. With ``direct`` transfers bypass the page cache where the file system can
    (tmpfs cannot): ``granule`` is what addresses of memory must then be multiples of, 0 where it can't. Folder 0700,
    files 0600. Raises StorageError when ``path`` cannot be used or is itself the folder of a live run.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        parent = Path(path)
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_locked(parent)
            for left in dead_folders(parent, PREFIX):
                with suppress(OSError):
                    remove_dead(left)
            path, lock = locked_folder(parent, f"{PREFIX}{os.getpid()}-")
            self.path = path.resolve()
        except StorageError:
            raise
        except OSError as error:
            raise _failure(f"make a folder in {parent}", parent, error) from error
        self._slabs: list[Slab] = []
        self._unmapped: deque[tuple[Slab, int, int]] = deque()
        self._remove = weakref.finalize(self, _remove_folder, self.path, lock, os.getpid(), self._slabs)
        self._count = 0
        self._lock = threading.Lock()
        self.granule = _granule(self.path) if direct else 0

    def allocate(self, nbytes: int) -> "Extent":
        """``nbytes`` bytes of undefined content; their blocks are reserved: no later write finds the disk full.

        Raises StorageError when there is no room or the folder is gone.
        """
        if not 0 < nbytes <= SMALL_NBYTES:
            path, file = self._reserve(nbytes, nbytes)
            os.close(file)
            return Extent(self, path, nbytes)
        with suppress(IndexError):
            while True:
                self.give_back(*self._unmapped.pop())
        with self._lock:
            for slab in reversed(self._slabs):
                start = slab.room.take(nbytes)
                if start is not None:
                    return Extent(self, slab.path, nbytes, slab, start)
            slab = self._new_slab(nbytes)
            start = slab.room.take(nbytes)
            assert start is not None
            return Extent(self, slab.path, nbytes, slab, start)

    def give_back(self, slab: Slab, start: int, nbytes: int) -> None:
        """These bytes of a slab are nobody's any more; the file goes when all of them are."""
        with self._lock:
            slab.room.give_back(start, nbytes)
            if slab.room.unused and slab in self._slabs:
                self._slabs.remove(slab)
                with suppress(OSError):
                    slab.path.unlink()

    def _new_slab(self, nbytes: int) -> Slab:
        try:
            size = slab_nbytes(nbytes, sum(slab.room.nbytes for slab in self._slabs), files.free_nbytes(self.path))
            slab = self._slab(size, nbytes)
        except (OSError, StorageError):
            size = slab_nbytes(nbytes, 0, 0)  # there may be room for this one alone
            slab = self._slab(size, nbytes)
        self._slabs.append(slab)
        return slab

    def _slab(self, nbytes: int, asked: int) -> Slab:
        path, file = self._reserve(nbytes, asked)
        if self.granule:
            return Slab(path, file, nbytes)
        os.close(file)  # transfers through the page cache open it; and no system has to remove an open file
        return Slab(path, None, nbytes)

    def _reserve(self, nbytes: int, asked: int) -> tuple[Path, int]:
        """A new file of so many bytes, and a descriptor of it, which the caller closes."""
        path = self.path / f"extent-{self._count}"
        self._count += 1
        try:
            file = files.open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, direct=self.granule > 0)
            try:
                if nbytes > files.free_nbytes(self.path):  # rather than fill the disk to find out
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if nbytes:
                    files.reserve(file, round_up(nbytes))
            except OSError:
                os.close(file)
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _failure(f"reserve {format_nbytes(asked)} ({asked} bytes)", path, error) from error
        return path, file

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise StorageError where fewer than ``nbytes`` are free: before ``what`` is written, not in the midst."""
        with self._lock:
            free = files.free_nbytes(self.path) + sum(slab.room.free_nbytes for slab in self._slabs)
        if nbytes > free:
            raise StorageError(
                f"{what} will take {format_nbytes(nbytes)} ({nbytes} bytes) in {self.path.parent}, where {free} bytes "
                f"are free on this disk, {nbytes - free} too few; make room (`tapestream clean` finds what killed runs "
                "have left) or choose another folder"
            )

    def close(self) -> None:
        """Remove the folder with all its extents and unlock it, as garbage collection would. May be called twice."""
        self._remove()


class Extent:
    """``nbytes`` bytes of a file, of its own or of a slab from byte ``start`` on. Transfers release the GIL and raise
    StorageError when they fail."""

    __slots__ = ("__weakref__", "_folder", "_mapping", "_slab", "_start", "_unflushed", "nbytes", "path")

    def __init__(self, folder: DiskFolder, path: Path, nbytes: int, slab: Slab | None = None, start: int = 0) -> None:
        self._folder, self._slab, self._start = folder, slab, start
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._unflushed = False
        self.path = path
        self.nbytes = nbytes

    def read_into(self, tensor: torch.Tensor, *, offset: int = 0, nbytes: int | None = None) -> None:
        """Fill the first ``nbytes`` bytes (None: all) of a contiguous CPU tensor from byte ``offset`` of the extent."""
        self._transfer("read", tensor, offset, nbytes)

    def write_from(self, tensor: torch.Tensor, *, offset: int = 0, nbytes: int | None = None) -> None:
        """Write the first ``nbytes`` bytes (None: all) of a contiguous CPU tensor to byte ``offset`` of the extent."""
        self._transfer("write", tensor, offset, nbytes)

    def start(
        self, verb: Literal["read", "write"], tensor: torch.Tensor, nbytes: int, queue: KernelQueue
    ) -> Pending | None:
        """Have the kernel move the first ``nbytes`` bytes to or from uint8 CPU memory, which stays as it is until then.
        None where it can't be begun like that: `read_into` and `write_from` always can."""
        slab, granule = self._slab, self._folder.granule
        if slab is None or slab.file is None or slab.closed or self._unflushed or not granule or not tensor.is_cpu:
            return None
        if not 0 < nbytes <= min(self.nbytes, tensor.nbytes) or (nbytes % ALIGNMENT and nbytes < self.nbytes):
            return None
        return queue.start(slab.file, tensor, nbytes, self._start, write=verb == "write", granule=granule)

    def map(self) -> torch.Tensor:
        """The extent's bytes as a uint8 tensor that shares them: what is written to either is seen by both."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        mapping = self._mapped_now()
        if mapping is None:
            with self._opened("map", os.O_RDWR) as file:
                mapping = mmap.mmap(file, self.nbytes, offset=self._start)
            self._mapping = weakref.ref(mapping)
            note(self, mapping)
        self._unflushed = True
        return torch.frombuffer(mapping, dtype=torch.uint8)

    @property
    def mapped(self) -> bool:
        """True while a tensor from `map` lives."""
        return self._mapped_now() is not None

    @property
    def address(self) -> int | None:
        """Where in memory `map` shows its first byte, None where no such tensor lives."""
        mapping = self._mapped_now()
        return None if mapping is None else address_of(mapping)

    @property
    def direct(self) -> bool:
        """Whether transfers can pass the page cache by."""
        return self._folder.granule > 0

    def flush(self) -> None:
        """Bring what was written through `map` to the file's blocks. Direct transfers do it themselves."""
        with self._opened("flush", os.O_RDWR) as file:
            files.write_back(file, self._start, self.nbytes)
        self._unflushed = self.mapped

    def delete(self) -> None:
        """Give the bytes back to the disk. A mapping that somebody still holds stays readable."""
        if self._slab is None:
            with suppress(OSError):
                self.path.unlink()
            return
        room = self._slab, self._start, self.nbytes
        mapping = self._mapped_now()
        if mapping is None:
            self._folder.give_back(*room)
        else:  # garbage collection takes no lock
            weakref.finalize(mapping, self._folder._unmapped.append, room).atexit = False

    def _mapped_now(self) -> mmap.mmap | None:
        """The mapping that tensors from `map` show, if any lives."""
        return None if self._mapping is None else self._mapping()

    def _transfer(self, verb: str, tensor: torch.Tensor, offset: int, nbytes: int | None) -> None:
        nbytes = tensor.nbytes if nbytes is None else nbytes
        if not tensor.is_cpu or not tensor.is_contiguous() or not 0 <= nbytes <= tensor.nbytes:
            raise InputError(f"cannot {verb} {nbytes} bytes through {tensor.device} memory of {tensor.nbytes} bytes")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise InputError(f"cannot {verb} bytes {offset} to {offset + nbytes} of an extent of {self.nbytes} bytes")
        if nbytes == 0:
            return
        end = offset + nbytes  # the extent's last page may be overwritten: there is nothing behind it
        direct = self._folder.granule > 0 and offset % ALIGNMENT == 0 and (end % ALIGNMENT == 0 or end == self.nbytes)
        if direct and self._unflushed:
            self.flush()  # the device must hold what the mapping says before the page cache is bypassed
        action = f"{verb} {format_nbytes(nbytes)}"
        with self._opened(action, os.O_RDONLY if verb == "read" else os.O_WRONLY, direct=direct) as file:
            granule = self._folder.granule if direct else 0
            done = move_bytes(
                file, bytes_of(tensor)[:nbytes], self._start + offset, write=verb == "write", granule=granule
            )
        if done < nbytes:
            raise StorageError(
                f"could not {action} at byte {self._start + offset} of {self.path}: it ended after {done} bytes; "
                "the file was cut short by somebody else, so run again in a folder that nothing else touches"
            )

    @contextmanager
    def _opened(self, action: str, flags: int, *, direct: bool = False) -> Iterator[int]:
        """A descriptor of the file; an OSError from opening it or from the block becomes a StorageError."""
        slab = self._slab
        try:
            if slab is not None and slab.closed:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if slab is not None and slab.file is not None and direct:
                yield slab.file
                return
            file = files.open_private(self.path, flags, direct=direct)
            try:
                yield file
            finally:
                os.close(file)
        except StorageError:
            raise
        except OSError as error:
            raise _failure(action, self.path, error) from error


def _failure(action: str, path: Path, error: OSError) -> StorageError:
    match error.errno:
        case errno.ENOENT if not action.startswith("make"):
            advice = "the file or its folder was removed while in use; run again, and leave the folder alone meanwhile"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return _no_room(action, path, error.strerror or str(error))
        case errno.EMFILE | errno.ENFILE:
            advice = "the program may not open more files; raise `ulimit -n`"
        case errno.ENOTDIR | errno.EEXIST:
            advice = "a file is in the way; choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS | errno.ENOENT:
            advice = "writing is not permitted; choose another folder"
        case _:
            advice = "the device may be failing; choose another folder"
    return StorageError(f"could not {action}: {path}: {error.strerror or error}; {advice}")


def _no_room(action: str, path: Path, reason: str) -> StorageError:
    folder = next(above for above in path.absolute().parents if above.exists())
    return StorageError(
        f"could not {action}: {path}: {reason}; {files.free_nbytes(folder)} bytes are free on this disk; make room "
        f"(`tapestream clean` finds what killed runs have left) or choose another folder"
    )


def _refuse_locked(path: Path) -> None:
    """Raise StorageError if ``path`` is the folder of a live run (its lock is held), which will remove it."""
    owner = owner_of(path)
    if owner is not None:
        raise StorageError(
            f"{path} is the folder of a run that is still going (process {owner}), which will remove it when it ends; "
            f"give the folder above it ({path.parent}), where each run makes its own, or wait for that process"
        )


def _granule(path: Path) -> int:
    """What addresses and lengths of direct transfers must be multiples of; 0 where there are none."""
    probe = path / "probe"
    try:
        file = files.open_private(probe, os.O_WRONLY | os.O_CREAT, direct=True)
    except OSError:
        probe.unlink(missing_ok=True)
        return 0
    try:
        with own_pages(2 * ALIGNMENT) as memory:
            for granule in (SECTOR, ALIGNMENT):
                with suppress(OSError):  # some file systems accept the flag and refuse the transfer
                    if os.write(file, memoryview(memory)[granule : 2 * granule]) == granule:
                        return granule
        return 0
    finally:
        os.close(file)
        probe.unlink(missing_ok=True)


def _remove_folder(path: Path, lock: Lock, owner: int, slabs: list[Slab]) -> None:
    for slab in slabs:
        slab.closed = True
    slabs.clear()
    if os.getpid() != owner:  # a forked child has copies of the object and of the lock, but the files are its parent's
        return
    with suppress(OSError):  # as much as can be: what is left still tells that it is, and goes with the next run
        remove_locked(path, lock)
    lock.close()
