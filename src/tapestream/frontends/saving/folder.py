"""`Saves`: a folder of numbered saves, each complete or not there at all."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving.manifest import MANIFEST, is_save, was_save
from tapestream.storage.locked import (
    dead_folders,
    locked_again,
    locked_folder,
    remove_dead,
    remove_locked,
    wait_for,
)
from tapestream.system.files import sync_folder
from tapestream.system.locks import Lock
from tapestream.units import format_nbytes

_NUMBER = re.compile(r"[0-9]{6,}")
_UNFINISHED = ".saving-"
_PUSHED_OUT = re.compile(r"\.saving-[0-9]{6,}-[0-9]+")


class Saves:
    """``path`` holds saves as folders ``000001``, ``000002``...; nothing else in it is ever touched.

    A folder is a save if its manifest says so. One whose manifest is damaged or of a later version, and a link to a
    save, count when the latest is looked for and the next is numbered, but are never removed, nor kept in the place of
    others.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises InputError for what names no folder."""
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(name, str) or "\0" in name or not name:
            raise InputError(f"{path!r} was given as the folder of saves; give its path as a string or a Path")
        self.path = Path(name)

    def complete(self) -> list[Path]:
        """Saves from the oldest to the latest."""
        return [path for path in self._numbered() if not path.is_symlink() and is_save(path)]

    def latest(self) -> Path:
        """The last save in ``path``, or ``path`` if it is one itself. Raises InputError when there is none."""
        if is_save(self.path):
            return self.path
        found = self._taken()
        if found:
            return found[-1]
        if (self.path / MANIFEST).is_file() or was_save(self.path):
            return self.path  # to be named by who reads it
        there = "no such folder" if not self.path.exists() else "no complete save in it"
        raise InputError(f"{str(self.path)!r} was to be loaded: there is {there}; name the folder given to ts.save()")

    def unfinished(self) -> list[Path]:
        """What runs that were killed while saving have left; the next save removes it."""
        return [*dead_folders(self.path, _UNFINISHED), *filter(_is_rest, self._pushed_out())]

    def remove(self, left: Path) -> bool:
        """Remove one of `unfinished`; False where somebody is at work on it. Raises OSError."""
        if not _is_rest(left):
            return remove_dead(left)
        if left.is_symlink():
            left.unlink()
        else:
            left.rmdir()
        return True

    def _numbered(self) -> list[Path]:
        found = self.path.iterdir() if self.path.is_dir() else iter(())
        return sorted((p for p in found if _NUMBER.fullmatch(p.name)), key=lambda p: int(p.name))

    def _taken(self) -> list[Path]:
        """Saves, and what else was one or leads to one."""
        return [path for path in self._numbered() if was_save(path) or is_save(path)]

    def _pushed_out(self) -> list[Path]:
        return [path for path in self.path.glob(f"{_UNFINISHED}*") if _PUSHED_OUT.fullmatch(path.name)]

    def settle(self) -> None:
        """Return when all is removed that saves of this or another process have pushed out."""
        for path in self._pushed_out():
            if not path.is_symlink():
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
        work, lock = self._begin(nbytes)
        try:
            yield work
            self.made = self._finish(work, lock)
        except BaseException:
            with suppress(OSError):
                remove_locked(work, lock)
            raise
        finally:
            lock.close()
        for old in self.complete()[:-keep]:
            self._push_out(old)

    @contextmanager
    def beside(self, nbytes: int) -> Iterator[Path]:
        """A private folder on the same disk, to make something of ``nbytes`` in that is no save and to move it from
        there; it goes when the block ends, or is among `unfinished` where the process is killed. Raises StorageError
        when they do not fit on the disk."""
        work, lock = self._begin(nbytes)
        try:
            yield work
        finally:
            with suppress(OSError):
                remove_locked(work, lock)
            lock.close()

    def _begin(self, nbytes: int) -> tuple[Path, Lock]:
        if is_save(self.path):
            raise StorageError(
                f"{self.path} is a save itself, which later saves remove with everything in it; save in the folder "
                f"that holds it, {self.path.parent}"
            )
        try:
            self.settle()
            for left in self.unfinished():
                with suppress(OSError):
                    self.remove(left)
            self.check_room(nbytes)
            return locked_folder(self.path, _UNFINISHED)
        except OSError as error:
            raise _failed(self.path, error) from error

    def _finish(self, work: Path, lock: Lock) -> Path:
        try:
            sync_folder(work)
            number = max((int(path.name) for path in self._taken()), default=0) + 1
            while True:
                made = self.path / f"{number:06d}"
                try:
                    if not os.path.lexists(made):  # an empty folder would be replaced
                        lock.rename(work, made)
                        break
                except OSError:  # another process has just finished one of this number
                    if not os.path.lexists(made):
                        raise
                number += 1
            sync_folder(self.path)
            return made
        except OSError as error:
            raise _failed(self.path, error) from error

    def _push_out(self, old: Path) -> None:
        """Out of sight first, so that what is half removed is no save; killed meanwhile, nobody holds its lock."""
        gone = self.path / f"{_UNFINISHED}{old.name}-{os.getpid()}"
        with suppress(OSError):
            lock = locked_again(old)
            try:
                lock.rename(old, gone)
                threading.Thread(target=_remove, args=(gone, lock), name="tapestream-remove").start()
            except (OSError, RuntimeError):  # another process was first; or this one ends, and takes no new threads
                lock.close()


def _is_rest(pushed_out: Path) -> bool:
    """A folder that was emptied before the end came; or a link, which earlier versions took for a save."""
    with suppress(OSError):
        return pushed_out.is_symlink() or not any(pushed_out.iterdir())
    return False


def _remove(folder: Path, lock: Lock) -> None:
    with suppress(OSError):
        remove_locked(folder, lock)
    lock.close()


def _failed(path: Path, error: OSError) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StorageError(f"could not save in {path}: {error.strerror or error}; what was saved before is intact")
