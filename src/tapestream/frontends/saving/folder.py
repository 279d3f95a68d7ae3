"""`Saves`: a folder of numbered saves, each complete or not there at all."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tapestream.errors import InputError, StorageError
from tapestream.storage.locked import (
    dead_folders,
    locked_again,
    locked_folder,
    remove_dead,
    remove_locked,
    unlock,
    wait_for,
)
from tapestream.units import format_nbytes

MANIFEST = "manifest.json"
_NUMBER = re.compile(r"\d{6,}")
_UNFINISHED = ".saving-"
_PUSHED_OUT = re.compile(r"\.saving-\d{6,}-\d+")


class Saves:
    """``path`` holds saves as folders ``000001``, ``000002``...; nothing else in it is ever touched."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def complete(self) -> list[Path]:
        """Saves from the oldest to the latest."""
        found = self.path.iterdir() if self.path.is_dir() else iter(())
        whole = [p for p in found if _NUMBER.fullmatch(p.name) and (p / MANIFEST).is_file()]
        return sorted(whole, key=lambda p: int(p.name))

    def latest(self) -> Path:
        """The last save in ``path``, or ``path`` if it is one itself. Raises InputError when there is none."""
        if (self.path / MANIFEST).is_file():
            return self.path
        found = self.complete()
        if not found:
            there = "no such folder" if not self.path.exists() else "no complete save in it"
            raise InputError(
                f"{str(self.path)!r} was to be loaded: there is {there}; name the folder given to ts.save()"
            )
        return found[-1]

    def unfinished(self) -> list[Path]:
        """What runs that were killed while saving have left; the next save removes it."""
        return dead_folders(self.path, _UNFINISHED)

    def settle(self) -> None:
        """Return when all is removed that saves of this or another process have pushed out."""
        for path in self.path.glob(f"{_UNFINISHED}*"):
            if _PUSHED_OUT.fullmatch(path.name):
                wait_for(path)

    def check_room(self, nbytes: int, count: int = 1) -> None:
        """Raise StorageError unless the folder is there, or can be made, and so many saves of ``nbytes`` each fit on
        its disk."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise _failed(self.path, error) from error
        if count * nbytes > free:
            what = f"a save of {format_nbytes(nbytes)} ({nbytes} bytes) does"
            if count > 1:
                what = f"{count} saves, as many as there will be at once, of {format_nbytes(nbytes)} each do"
            raise StorageError(
                f"{what} not fit in {self.path}: {free} bytes are free on this disk, {count * nbytes - free} are "
                "missing; make room, or choose another folder"
            )

    @contextmanager
    def new(self, nbytes: int, *, keep: int) -> Iterator[Path]:
        """A folder to write the next save in, which becomes one when the block ends without an exception.

        Then all but the last ``keep`` saves are removed, on a thread: freeing bytes takes a disk up to a third of the
        time of writing them, and nothing waits for it but the next save and the end of the process. Raises
        StorageError when ``nbytes`` do not fit on the disk.
        """
        try:
            self.settle()
            for left in self.unfinished():
                with suppress(OSError):
                    remove_dead(left)
            self.check_room(nbytes)
            work, lock = locked_folder(self.path, _UNFINISHED)
        except OSError as error:
            raise _failed(self.path, error) from error
        try:
            yield work
            self.made = self._finish(work)
        except BaseException:
            with suppress(OSError):
                remove_locked(work)
            raise
        finally:
            unlock(lock)
        for old in self.complete()[:-keep]:
            self._push_out(old)

    def _finish(self, work: Path) -> Path:
        try:
            _to_disk(work)
            while True:
                made = self.path / f"{self._next():06d}"
                try:
                    work.rename(made)
                    break
                except OSError:  # another process has just finished one of this number
                    if not made.exists():
                        raise
            _to_disk(self.path)
            return made
        except OSError as error:
            raise _failed(self.path, error) from error

    def _next(self) -> int:
        numbers = [int(p.name) for p in self.path.iterdir() if _NUMBER.fullmatch(p.name)]
        return max(numbers, default=0) + 1

    def _push_out(self, old: Path) -> None:
        """Out of sight first, so that what is half removed is no save; killed meanwhile, nobody holds its lock."""
        gone = self.path / f"{_UNFINISHED}{old.name}-{os.getpid()}"
        with suppress(OSError):
            lock = locked_again(old)
            try:
                old.rename(gone)
                threading.Thread(target=_remove, args=(gone, lock), name="tapestream-remove").start()
            except (OSError, RuntimeError):  # another process was first; or this one ends, and takes no new threads
                unlock(lock)


def _remove(folder: Path, lock: int) -> None:
    with suppress(OSError):
        remove_locked(folder)
    unlock(lock)


def _to_disk(folder: Path) -> None:
    """What the folder lists is on the disk when this returns."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _failed(path: Path, error: OSError) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StorageError(f"could not save in {path}: {error.strerror or error}; what was saved before is intact")
