"""Locks on the file itself, and on one beside it where there is no ``fcntl``: the same for who uses them."""

from pathlib import Path
from threading import Thread

import pytest

from tapestream.storage.locked import LOCK, dead_folders, locked_folder, remove_dead
from tapestream.system import locks
from tapestream.system.locks import lock_file, lock_open


@pytest.fixture(params=["itself", "beside"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "beside":
        monkeypatch.setattr(locks, "fcntl", None)
    return str(request.param)


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(FileNotFoundError):
        lock_file(path)
    lock = lock_file(path, new=True)
    lock.write(b"long ago")
    lock.write(b"now")
    assert lock.read() == b"now"
    assert lock.there
    with pytest.raises(FileExistsError):
        lock_file(path, new=True)
    with pytest.raises(BlockingIOError):
        lock_file(path, make=True)
    took: list[bytes] = []
    waits = Thread(target=lambda: took.append(lock_file(path, wait=True).read()))
    waits.start()
    waits.join(0.1)
    assert waits.is_alive()
    lock.close()
    lock.close()
    waits.join()
    assert took == [b"now"]


def test_a_folder_is_renamed_and_removed_with_its_lock_held(tmp_path: Path) -> None:
    path, lock = locked_folder(tmp_path, "run-")
    to = tmp_path / "run-renamed"
    lock.rename(path, to)
    assert dead_folders(tmp_path, "run-") == []
    with pytest.raises(BlockingIOError):
        lock_file(to / LOCK)
    with pytest.raises(OSError):
        lock.rename(to, tmp_path / "no" / "such")
    assert not remove_dead(to)
    lock.close()
    assert dead_folders(tmp_path, "run-") == [to]
    assert remove_dead(to)
    assert list(tmp_path.iterdir()) == []


def test_who_waits_for_a_folder_that_is_removed_is_told(tmp_path: Path, kind: str) -> None:
    path, lock = locked_folder(tmp_path, "run-")
    said: list[str] = []

    def waits() -> None:
        try:
            found = lock_file(path / LOCK, wait=True)
            said.append("there" if found.there else "gone")
            found.close()
        except FileNotFoundError:
            said.append("gone")

    thread = Thread(target=waits)
    thread.start()
    thread.join(0.1)
    (path / LOCK).unlink()
    lock.close()
    thread.join()
    assert said == ["gone"]
    assert [found.name for found in path.iterdir() if not found.name.endswith(locks.BESIDE)] == []


def test_an_open_file_is_locked_until_it_is_closed(tmp_path: Path, kind: str) -> None:
    """By another process, where it is the file itself."""
    path = tmp_path / "lines"
    stream = path.open("a+")
    lock_open(stream, path)
    if kind == "beside":
        with path.open("a+") as other, pytest.raises(BlockingIOError):
            lock_open(other, path)
    stream.close()
    del stream
    with path.open("a+") as other:
        lock_open(other, path)
