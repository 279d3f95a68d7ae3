"""Files as a memory tier: a locked folder of one run, and extents of bytes in it.

One file per extent, opened for each transfer: opening costs microseconds beside the milliseconds of a transfer, takes
no descriptors from the program, and finds out at once when somebody removed the folder.
"""

import errno
import fcntl
import json
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tapestream.errors import InputError, StorageError
from tapestream.storage.transfer import ALIGNMENT, move_bytes, round_up, write_back
from tapestream.units import format_nbytes

LOCK = "lock"
"""The file in a run's folder that is locked while it lives, and then names its process."""

_PREFIX = "tapestream-"


class DiskFolder:
    """A folder of this run's own below ``path`` (made if missing), locked while it lives, removed by `close`.

    ``path`` of the object is that folder; ``direct`` says whether transfers bypass the page cache, which needs the
    file system's help (tmpfs has none). Folder 0700, files 0600. Raises StorageError when
    ``path`` cannot be used or is itself the folder of a live run.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: bool = True) -> None:
        parent = Path(path)
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_locked(parent)
            for left in dead_folders(parent):
                shutil.rmtree(left, ignore_errors=True)
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)).resolve()
            lock = _lock(self.path)
        except StorageError:
            raise
        except OSError as error:
            raise _failure(f"make a folder in {parent}", parent, error) from error
        self._remove = weakref.finalize(self, _remove_folder, self.path, lock, os.getpid())
        self._count = 0
        self.direct = direct and _takes_direct(self.path)

    def allocate(self, nbytes: int) -> "Extent":
        """A file of ``nbytes`` bytes of undefined content; its blocks are reserved: no later write finds the disk full.

        Raises StorageError when there is no room or the folder is gone.
        """
        path = self.path / f"extent-{self._count}"
        self._count += 1
        action = f"reserve {format_nbytes(nbytes)} ({nbytes} bytes)"
        with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, action) as file:
            try:
                if nbytes > _free_nbytes(self.path):  # rather than fill the disk to find out
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if nbytes:
                    os.posix_fallocate(file, 0, round_up(nbytes))
            except OSError:
                path.unlink(missing_ok=True)
                raise
        return Extent(self, path, nbytes)

    def check_room(self, nbytes: int, what: str) -> None:
        """Raise StorageError where fewer than ``nbytes`` are free: before ``what`` is written, not in the midst."""
        free = _free_nbytes(self.path)
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
    """``nbytes`` bytes in a file of their own. Transfers release the GIL and raise StorageError when they fail."""

    __slots__ = ("_folder", "_mapping", "_unflushed", "nbytes", "path")

    def __init__(self, folder: DiskFolder, path: Path, nbytes: int) -> None:
        self._folder = folder
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

    def map(self) -> torch.Tensor:
        """The extent's bytes as a uint8 tensor that shares them: what is written to either is seen by both."""
        if self.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None:
            with _opened(self.path, os.O_RDWR, "map") as file:
                mapping = mmap.mmap(file, self.nbytes)
            self._mapping = weakref.ref(mapping)
        self._unflushed = True
        return torch.frombuffer(mapping, dtype=torch.uint8)

    @property
    def mapped(self) -> bool:
        """True while a tensor from `map` lives."""
        return self._mapping is not None and self._mapping() is not None

    def flush(self) -> None:
        """Bring what was written through `map` to the file's blocks. Direct transfers do it themselves."""
        with _opened(self.path, os.O_RDWR, "flush") as file:
            write_back(file)
        self._unflushed = self.mapped

    def delete(self) -> None:
        """Remove the file. A mapping that somebody still holds stays readable."""
        with suppress(OSError):
            self.path.unlink()

    def _transfer(self, verb: str, tensor: torch.Tensor, offset: int, nbytes: int | None) -> None:
        nbytes = tensor.nbytes if nbytes is None else nbytes
        if not tensor.is_cpu or not tensor.is_contiguous() or not 0 <= nbytes <= tensor.nbytes:
            raise InputError(f"cannot {verb} {nbytes} bytes through {tensor.device} memory of {tensor.nbytes} bytes")
        if offset < 0 or offset + nbytes > self.nbytes:
            raise InputError(f"cannot {verb} bytes {offset} to {offset + nbytes} of an extent of {self.nbytes} bytes")
        if nbytes == 0:
            return
        end = offset + nbytes  # the last page of the file may be overwritten: there is nothing behind the extent
        direct = self._folder.direct and offset % ALIGNMENT == 0 and (end % ALIGNMENT == 0 or end == self.nbytes)
        if direct and self._unflushed:
            self.flush()  # the device must hold what the mapping says before the page cache is bypassed
        memory = tensor.detach().view(-1).view(torch.uint8)[:nbytes]
        flags = (os.O_RDONLY if verb == "read" else os.O_WRONLY) | (os.O_DIRECT if direct else 0)
        action = f"{verb} {format_nbytes(nbytes)}"
        with _opened(self.path, flags, action) as file:
            done = move_bytes(file, memory, offset, write=verb == "write", direct=direct)
        if done < nbytes:
            raise StorageError(
                f"could not {action} at byte {offset} of {self.path}: it ended after {done} bytes; "
                "the file was cut short by somebody else, so run again in a folder that nothing else touches"
            )


@contextmanager
def _opened(path: Path, flags: int, action: str) -> Iterator[int]:
    """A descriptor of ``path``; an OSError from opening it or from the block becomes a StorageError."""
    try:
        file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            yield file
        finally:
            os.close(file)
    except StorageError:
        raise
    except OSError as error:
        raise _failure(action, path, error) from error


def _failure(action: str, path: Path, error: OSError) -> StorageError:
    match error.errno:
        case errno.ENOENT:
            advice = "the file or its folder was removed while in use; run again, and leave the folder alone meanwhile"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return _no_room(action, path, error.strerror or str(error))
        case errno.EACCES | errno.EPERM | errno.EROFS:
            advice = "it may not be written to; choose another folder"
        case _:
            advice = "the device may be failing; choose another folder"
    return StorageError(f"could not {action}: {path}: {error.strerror or error}; {advice}")


def _no_room(action: str, path: Path, reason: str) -> StorageError:
    folder = next(above for above in path.absolute().parents if above.exists())
    return StorageError(
        f"could not {action}: {path}: {reason}; {_free_nbytes(folder)} bytes are free on this disk; make room "
        f"(`tapestream clean` finds what killed runs have left) or choose another folder"
    )


def _free_nbytes(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def dead_folders(parent: Path) -> list[Path]:
    """Folders below ``parent`` of runs that were killed: nobody holds their locks, so nobody will remove them."""
    return sorted(path for path in parent.glob(f"{_PREFIX}*") if is_dead(path))


def is_dead(path: Path) -> bool:
    """Whether ``path`` is a folder that a run has locked, and that run is gone."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        named = os.fstat(file).st_size > 0  # else its run has made it just now and is about to take it
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return named and not path.is_symlink()


def _refuse_locked(path: Path) -> None:
    """Raise StorageError if ``path`` is the folder of a live run (its lock is held), which will remove it."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = json.loads(os.pread(file, 1000, 0) or b"{}").get("pid", "unknown")
        raise StorageError(
            f"{path} is the folder of a run that is still going (process {owner}), which will remove it when it ends; "
            f"give the folder above it ({path.parent}), where each run makes its own, or wait for that process"
        ) from None
    finally:
        os.close(file)


def _lock(path: Path) -> int:
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, json.dumps({"pid": os.getpid()}).encode())
    except OSError:
        os.close(file)
        raise
    return file


def _takes_direct(path: Path) -> bool:
    probe = path / "probe"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        probe.unlink(missing_ok=True)
        return False
    try:
        with mmap.mmap(-1, ALIGNMENT) as page:  # some file systems accept the flag and refuse the transfer
            return os.pwrite(file, page, 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(file)
        probe.unlink(missing_ok=True)


def _remove_folder(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has copies of the object and of the lock, but the files are its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
