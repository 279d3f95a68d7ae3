"""Locks on files, which go with the process that holds them, however it ends.

Where there is ``fcntl``, the system locks the file itself, by its open descriptor. Elsewhere (Windows) the library
`filelock` locks a file beside it, whose name ends in `BESIDE`. Open files keep folders from being renamed or removed
there: the lock is given up for that moment, in which another process may take it, and one that was to be kept tells so.
"""

import errno
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tapestream.system.files import open_private

if TYPE_CHECKING:
    import filelock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BESIDE = ".held"
"""What the names end in of files that are locked for others."""
_AGAIN_SECONDS = 0.02


class Lock:
    """A file that is locked until `close`, and what it says."""

    def __init__(self, path: Path, file: int | None, beside: "filelock.BaseFileLock | None" = None) -> None:
        self._path, self._file, self._beside = path, file, beside

    @property
    def there(self) -> bool:
        """Whether the file has not been removed, so that others find it."""
        return self._path.exists() if self._file is None else os.fstat(self._file).st_nlink > 0

    def read(self) -> bytes:
        """What the file says, a line at most. Raises OSError."""
        if self._file is None:
            return self._path.read_bytes()
        os.lseek(self._file, 0, os.SEEK_SET)
        return os.read(self._file, 1000)

    def write(self, text: bytes) -> None:
        """Have the file say something else. Raises OSError."""
        if self._file is None:
            self._path.write_bytes(text)
            return
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, text)

    def rename(self, folder: Path, to: Path) -> None:
        """Rename the folder that the file lies in, which stays locked. Raises OSError."""
        if self._file is not None:
            folder.rename(to)
            return
        name = self._path.relative_to(folder)
        self.let_go()
        try:
            folder.rename(to)
            self._path = to / name
        finally:
            with suppress(OSError):  # somebody else was faster: the folder is in their hands
                self._beside = _beside(self._path)

    def let_go(self) -> None:
        """Make ready for the file to be removed: where open files can't be, the lock is given up."""
        if self._file is None:
            self.close()

    def close(self) -> None:
        """Give the lock up, also where a forked process has a copy of the open file. May be called twice."""
        file, beside, self._beside = self._file, self._beside, None
        if beside is not None:
            beside.release()
        if file is not None and fcntl is not None:
            self._file = None
            with suppress(OSError):  # a file system without such locks
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def lock_file(path: Path, *, make: bool = False, new: bool = False, wait: bool = False, fork: bool = True) -> Lock:
    """Lock a file, by default one that is there; ``make`` one where there is none, or a ``new`` one only.

    ``wait`` until nobody has it. ``fork``: processes forked from this one have the lock, too; without it they don't,
    and this process itself may have it twice. Raises BlockingIOError where another has it, FileNotFoundError and
    FileExistsError, OSError where it is a link or cannot be locked.
    """
    made = (os.O_CREAT if make or new else 0) | (os.O_EXCL if new else 0)
    if fcntl is None:
        if new or (make and not path.exists()):  # else it is not opened: its folder may be about to be removed
            os.close(open_private(path, os.O_RDWR | made))
        return Lock(path, None, _beside(path, wait=wait))
    file = open_private(path, os.O_RDWR | made, follow=False)
    try:
        how = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        if fork:
            fcntl.flock(file, how)
        else:
            fcntl.lockf(file, how)
    except OSError as error:
        os.close(file)
        raise _taken(error) from error
    except BaseException:  # Ctrl-C, while it waits
        os.close(file)
        raise
    return Lock(path, file)


def lock_open(stream: TextIO, path: Path) -> None:
    """Lock the open file at ``path`` for this process until it is closed; where a file beside it is locked instead,
    until nobody knows of it any more. Raises BlockingIOError where another has it, OSError where it cannot be locked.
    """
    if fcntl is None:
        weakref.finalize(stream, _beside(path).release)
        return
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise _taken(error) from error


def _taken(error: OSError) -> OSError:
    """Some systems say of a lock that another has that there is no permission."""
    return BlockingIOError(errno.EAGAIN, error.strerror) if error.errno == errno.EACCES else error


def _beside(path: Path, *, wait: bool = False) -> "filelock.BaseFileLock":
    import filelock  # where it is needed: it takes a while

    lock = filelock.FileLock(f"{path}{BESIDE}", thread_local=False)
    while path.exists():  # else the library would make the folder again
        try:
            lock.acquire(timeout=0)
            return lock
        except filelock.Timeout:
            if not wait:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from None
        time.sleep(_AGAIN_SECONDS)  # its own waiting takes two holders in one process for a deadlock
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
