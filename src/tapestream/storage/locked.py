"""Folders of a run's own, locked while it lives, so that what is left of one that was killed can be told and removed.

The lock is ``flock`` on a file in the folder, which the system gives up with the process, however it ends. Once locked
it is given the process's number: a folder whose lock says nothing was just made, or its run was killed at that moment.
Both may be removed: who makes a folder looks again once it holds the lock, and makes another if that is gone.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tapestream.errors import StorageError

LOCK = "lock"
"""The file in a run's folder that is locked while it lives, and then names its process."""


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new private folder in ``parent``, and the open file that keeps it locked until closed. Raises OSError."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # somebody took it for what a killed run has left
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file).st_nlink:
                os.write(file, json.dumps({"pid": os.getpid()}).encode())
                return path, file
        except OSError:
            os.close(file)
            raise
        os.close(file)


def locked_again(path: Path) -> int:
    """Lock a folder that `locked_folder` has made, whose lock was given up. Raises OSError where somebody has it."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def unlock(file: int) -> None:
    """Give a lock up, also where a forked process has a copy of the open file."""
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


@contextmanager
def held_alone(path: Path, name: str) -> Iterator[None]:
    """Hold a folder that other runs use too, by a file in it, which goes with the block. Raises StorageError where
    another process has it, by its number, or it cannot be locked.

    The lock is one of records, not ``flock``: processes forked from this one, which outlive it by seconds if it is
    killed, do not inherit it.
    """
    while True:
        try:
            file = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StorageError(f"cannot lock {path}: {error.strerror or error}; choose another folder") from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                break
        except OSError as error:
            owner = os.pread(file, 20, 0).decode(errors="replace") or "unknown"
            os.close(file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StorageError(
                    f"{path} is in use by another run (process {owner}); wait for its end, or choose another folder"
                ) from error
            raise StorageError(f"cannot lock {path}: {error.strerror or error}; choose another folder") from error
        os.close(file)  # who had it has just removed it
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            (path / name).unlink()
        os.close(file)


def wait_for(path: Path) -> None:
    """Return when nobody holds the lock of this folder, or it is gone."""
    with suppress(OSError):
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            os.close(file)


def dead_folders(parent: Path, prefix: str) -> list[Path]:
    """Folders in ``parent`` that `locked_folder` made for runs that are gone."""
    return sorted(path for path in parent.glob(f"{prefix}*") if _dead(path, remove=False))


def remove_dead(path: Path) -> bool:
    """Remove the folder of a run that is gone; False, and nothing happens, if it is not gone. Raises OSError."""
    return _dead(path, remove=True)


def remove_locked(path: Path) -> None:
    """Remove a folder, its lock last: killed meanwhile, what is left still tells that it is. Raises OSError, also for a
    link to one, whose target is somebody else's."""
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    for found in path.iterdir():
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        elif found.name != LOCK:
            found.unlink()
    (path / LOCK).unlink(missing_ok=True)
    path.rmdir()


def _dead(path: Path, *, remove: bool) -> bool:
    if path.is_symlink():
        return False
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return _empty(path, remove=remove)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = _made_here(path, file)
        if dead and remove:  # with the lock held until all is gone
            remove_locked(path)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return dead


def _made_here(path: Path, file: int) -> bool:
    """Whether the lock says what ours do, or nothing yet: then nothing else can be there. Others lock files too."""
    if not os.fstat(file).st_nlink:  # somebody else has just removed it
        return False
    text = os.pread(file, 100, 0)
    if not text:
        return [found.name for found in path.iterdir()] == [LOCK]
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
            path.rmdir()
            return True
        return not any(path.iterdir())
    return False
