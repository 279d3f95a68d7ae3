"""Folders of a run's own, locked while it lives, so that what is left of one that was killed can be told and removed.

The lock is on a file in the folder, and goes with the process, however it ends. Once locked that is given the process's
number: a folder whose lock says nothing was just made, or its run was killed at that moment. Both may be removed: who
makes a folder looks again once it holds the lock, and makes another if that is gone.
"""

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tapestream.errors import StorageError
from tapestream.system.locks import BESIDE, Lock, lock_file

LOCK = "lock"
"""The file in a run's folder that is locked while it lives, and then names its process."""
_BESIDE = LOCK + BESIDE
_MOMENTS, _MOMENT_SECONDS = 50, 0.02


def locked_folder(parent: Path, prefix: str) -> tuple[Path, Lock]:
    """A new private folder in ``parent``, and what keeps it locked until closed. Raises OSError."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = lock_file(path / LOCK, new=True, wait=True)
        except FileNotFoundError:  # somebody took it for what a killed run has left
            continue
        try:
            if lock.there:
                lock.write(json.dumps({"pid": os.getpid()}).encode())
                return path, lock
        except OSError:
            lock.close()
            raise
        lock.close()


def locked_again(path: Path) -> Lock:
    """Lock a folder that `locked_folder` has made, whose lock was given up. Raises OSError where somebody has it."""
    return lock_file(path / LOCK, make=True)


@contextmanager
def held_alone(path: Path, name: str) -> Iterator[None]:
    """Hold a folder that other runs use too, by a file in it, which goes with the block. Raises StorageError where
    another process has it, by its number, or it cannot be locked.

    Processes forked from this one, which outlive it by seconds if it is killed, do not inherit the lock.
    """
    while True:
        try:
            lock = lock_file(path / name, make=True, fork=False)
        except BlockingIOError as error:
            raise StorageError(
                f"{path} is in use by another run (process {_said(path / name)}); wait for its end, or choose another "
                "folder"
            ) from error
        except OSError as error:
            raise StorageError(f"cannot lock {path}: {error.strerror or error}; choose another folder") from error
        if lock.there:
            break
        lock.close()  # who had it has just removed it
    try:
        lock.write(str(os.getpid()).encode())
        yield
    finally:
        with suppress(OSError):
            (path / name).unlink()
        lock.close()


def _said(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes()[:20].decode(errors="replace") or "unknown"
    return "unknown"


def wait_for(path: Path) -> None:
    """Return when nobody holds the lock of this folder, or it is gone."""
    with suppress(OSError):
        lock_file(path / LOCK, wait=True).close()
    for _ in range(_MOMENTS):  # who removes a folder removes its lock first, and the empty folder a moment later
        if not path.exists() or (path / LOCK).exists():
            return
        with suppress(OSError):
            _remove_empty(path)
        time.sleep(_MOMENT_SECONDS)


def owner_of(path: Path) -> str | None:
    """The number of the process whose folder this is, which holds its lock; None where nobody does. Raises OSError."""
    try:
        lock_file(path / LOCK).close()
    except FileNotFoundError:
        return None
    except BlockingIOError:
        with suppress(FileNotFoundError):  # it has just gone
            return str(json.loads((path / LOCK).read_bytes() or b"{}").get("pid", "unknown"))
    return None


def dead_folders(parent: Path, prefix: str) -> list[Path]:
    """Folders in ``parent`` that `locked_folder` made for runs that are gone."""
    return sorted(path for path in parent.glob(f"{prefix}*") if _dead(path, remove=False))


def remove_dead(path: Path) -> bool:
    """Remove the folder of a run that is gone; False, and nothing happens, if it is not gone. Raises OSError."""
    return _dead(path, remove=True)


def remove_locked(path: Path, lock: Lock | None = None) -> None:
    """Remove a folder, its lock last: killed meanwhile, or where something can't be removed, what is left still tells
    that it is. Raises OSError, also for a link to one, whose target is somebody else's."""
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    failed: OSError | None = None
    for found in path.iterdir():
        try:
            if found.is_dir() and not found.is_symlink():
                shutil.rmtree(found)
            elif found.name not in (LOCK, _BESIDE):
                found.unlink()
        except OSError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    (path / LOCK).unlink(missing_ok=True)
    if lock is not None:
        lock.let_go()
    _remove_empty(path)


def _dead(path: Path, *, remove: bool) -> bool:
    if path.is_symlink():
        return False
    try:
        lock = lock_file(path / LOCK)
    except FileNotFoundError:
        return _empty(path, remove=remove)
    except OSError:  # somebody has it; or it is none of ours
        return False
    try:
        dead = _made_here(path, lock)
        if dead and remove:  # with the lock held until all is gone
            remove_locked(path, lock)
    finally:
        lock.close()
    return dead


def _made_here(path: Path, lock: Lock) -> bool:
    """Whether the lock says what ours do, or nothing yet: then nothing else can be there. Others lock files too."""
    if not lock.there:  # somebody else has just removed it
        return False
    text = lock.read()
    if not text:
        return all(found.name in (LOCK, _BESIDE) for found in path.iterdir())
    try:
        return isinstance(json.loads(text)["pid"], int)
    except (ValueError, KeyError, TypeError):
        return False


def _empty(path: Path, *, remove: bool) -> bool:
    """A folder without even a lock, which its run had no time to make. A full one is none of ours, nor one that people
    may have named: ours begin with a dot or tell the process, and end as mkdtemp ends them."""
    if not re.fullmatch(r"(\..*-|.*-\d+-)[a-z0-9_]{8}", path.name):
        return False
    with suppress(OSError):
        if remove:
            _remove_empty(path)
            return True
        return all(found.name == _BESIDE for found in path.iterdir())
    return False


def _remove_empty(path: Path) -> None:
    if (path / _BESIDE).exists():
        (path / _BESIDE).unlink()
    path.rmdir()
