"""Open files: transfers at a place, room, and what passes the page cache by.

Without Linux all goes through the page cache, which costs a second copy and takes memory that the system counts as its
own; where there is no ``preadv`` (Windows), transfers of one file go one after the other.
"""

import ctypes
import errno
import io
import os
import shutil
import tempfile
import threading
import uuid
from pathlib import Path

from tapestream.system.library import function

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PRIVATE = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # without the latter, Windows changes line ends
_WRITE_AND_WAIT = 7  # sync_file_range: start writing dirty pages, wait before and after
_NOT_RESERVED = errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL
_TURNS = tuple(threading.Lock() for _ in range(64))  # for files by their number


def open_private(path: str | os.PathLike[str], flags: int, *, direct: bool = False, follow: bool = True) -> int:
    """A descriptor that no other program inherits, of a file that nobody else may read where it is made.

    ``direct``: past the page cache; raises OSError where that can't be. ``follow``: False refuses links, where the
    system can.
    """
    if direct and not hasattr(os, "O_DIRECT"):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    flags |= _PRIVATE | (os.O_DIRECT if direct else 0) | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    return os.open(path, flags, 0o600)


def open_nameless(folder: Path, prefix: str) -> tuple[int, bool]:
    """A descriptor without a name, to read and to write, and whether it passes the page cache by. Where open files keep
    their names (Windows), it goes with the descriptor."""
    if hasattr(os, "O_TEMPORARY"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_TEMPORARY
        return open_private(folder / f"{prefix}{uuid.uuid4().hex}", flags), False
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
    try:
        direct = open_private(name, os.O_RDWR, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: there is no direct I/O
            os.close(descriptor)
            raise
        return descriptor, False
    finally:
        os.unlink(name)
    os.close(descriptor)
    return direct, True


def read_into(file: int, memory: memoryview, offset: int) -> int:
    """Fill memory from byte ``offset``; how many bytes it was, as many as there are in one call. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [memory], offset)
    with _TURNS[file % len(_TURNS)], io.FileIO(file, "r", closefd=False) as stream:
        stream.seek(offset)
        return stream.readinto(memory) or 0


def write_from(file: int, memory: memoryview, offset: int) -> int:
    """Write memory at byte ``offset``; how many bytes it was, as many as one call takes. Raises OSError."""
    if hasattr(os, "pwritev"):
        return os.pwritev(file, [memory], offset)
    with _TURNS[file % len(_TURNS)], io.FileIO(file, "w", closefd=False) as stream:
        stream.seek(offset)
        return stream.write(memory) or 0


def reserve(file: int, nbytes: int) -> None:
    """Make an empty file ``nbytes`` long, with blocks for all of them: no later write finds the disk full. Where they
    can't be asked for (macOS) it is as long, and a write may. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.ftruncate(file, nbytes)


def try_to_reserve(file: int, nbytes: int) -> None:
    """As `reserve`, where the file system can; else nothing happens. Raises OSError where there is no room."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            if error.errno not in _NOT_RESERVED:
                raise


def free_nbytes(path: str | os.PathLike[str]) -> int:
    """Bytes of the disk below ``path`` that are free for this user. Raises OSError."""
    return shutil.disk_usage(path).free


def taken_nbytes(path: Path) -> int:
    """Bytes of the disk that a file takes; where that is not said (Windows), how long it is."""
    status = path.stat()
    return int(status.st_blocks) * 512 if hasattr(status, "st_blocks") else status.st_size


def pass_cache(file: int, wanted: bool) -> None:
    """From now on, or no longer, pass the page cache by. Raises OSError where the file system can't; nothing happens
    where the system can't."""
    if fcntl is not None and hasattr(os, "O_DIRECT"):
        now = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, now | os.O_DIRECT if wanted else now & ~os.O_DIRECT)


def passes_cache(file: int) -> bool:
    """Whether transfers of this file pass the page cache by."""
    return fcntl is not None and hasattr(os, "O_DIRECT") and bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def forget_cached(file: int, start: int, nbytes: int) -> None:
    """The page cache need not keep these bytes; where the system takes no such advice, reads may come from there."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)


def sync_data(file: int) -> None:
    """What was written is on the disk when this returns. Raises OSError."""
    getattr(os, "fdatasync", os.fsync)(file)


def write_back(file: int, start: int, nbytes: int) -> None:
    """Write what mappings of these bytes of ``file`` left in the page cache, so that direct transfers see it. Raises
    OSError.

    Not fdatasync, which also empties the device's own cache: milliseconds each time, and direct reads see that cache.
    Without Linux the whole file is brought to the disk, which takes as long.
    """
    sync_file_range = function("sync_file_range")
    if sync_file_range is None:
        os.fsync(file)
    elif sync_file_range(file, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(_WRITE_AND_WAIT)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_folder(folder: Path) -> None:
    """What the folder lists is on the disk when this returns. Windows opens no folders: there the file system sees to
    it, a moment later. Raises OSError."""
    if hasattr(os, "O_DIRECTORY"):
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
