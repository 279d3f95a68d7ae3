"""Locked folders of runs: what a killed one has left is told from what a live one has just begun."""

import os
from pathlib import Path

import pytest

from tapestream.storage.locked import LOCK, dead_folders, locked_folder, remove_dead


def test_a_locked_folder_lives_until_its_lock_is_closed(tmp_path: Path) -> None:
    path, lock = locked_folder(tmp_path, "run-")
    (path / "a" / "b").mkdir(parents=True)
    (path / "c").write_text("x")
    assert dead_folders(tmp_path, "run-") == []
    assert not remove_dead(path)
    lock.close()
    assert dead_folders(tmp_path, "run-") == [path]
    assert dead_folders(tmp_path, "other-") == []
    assert remove_dead(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_taken_for_dead_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has a lock, and before that is locked."""
    taken: list[Path] = []
    real = os.open

    def opened(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and not taken:
            taken.append(Path(path).parent)
            assert remove_dead(taken[0])
        file = real(path, flags, mode)
        if flags & os.O_CREAT and len(taken) == 1:
            taken.append(Path(path).parent)
            assert remove_dead(taken[1])
        return file

    monkeypatch.setattr("tapestream.system.files.os.open", opened)
    path, lock = locked_folder(tmp_path, "run-12-")
    assert len(taken) == 2
    assert path not in taken
    assert list(tmp_path.iterdir()) == [path]
    assert not remove_dead(path)
    lock.close()


def test_the_lock_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while removing, what is left is still known."""
    path, lock = locked_folder(tmp_path, "run-")
    lock.close()
    for name in ("a", "z"):
        (path / name).mkdir()
        (path / name / "file").write_text("x")
    unlink, seen = os.unlink, []

    def noted(name: str, **options: int) -> None:
        seen.append(Path(name).name)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", noted)
    assert remove_dead(path)
    assert seen == ["file", "file", LOCK]


def test_others_have_files_of_that_name(tmp_path: Path) -> None:
    for number, text in enumerate(("", "12", "{}", "[]", "not JSON", '{"pid": "me"}')):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / LOCK).write_text(text)
        (folder / "mine").write_text("x")
    (tmp_path / "run-folder").mkdir()
    (tmp_path / "run-folder" / "mine").write_text("x")
    (tmp_path / "run-file").write_text("x")
    (tmp_path / "run-results1").mkdir()  # empty, but people have named it
    before = sorted(tmp_path.rglob("*"))
    assert dead_folders(tmp_path, "run-") == []
    assert not any(remove_dead(path) for path in tmp_path.iterdir())
    assert sorted(tmp_path.rglob("*")) == before
