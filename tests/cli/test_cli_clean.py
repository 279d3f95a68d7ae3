"""``tapestream clean`` removes what killed runs have left, and nothing else."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tapestream.cli.app import make_app
from tapestream.storage import DiskFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from tapestream.frontends.saving.folder import Saves
from tapestream.storage import DiskFolder
home = DiskFolder(sys.argv[1])
home.allocate(1 << 20)
with Saves(sys.argv[1]).new(0, keep=1) as work:
    (work / "half").write_bytes(b"x" * 10_000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a killed process has left: a home, and a save that it was writing."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy of that folder, with a live home and files of somebody else."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tapestream-notes").mkdir()
    (tmp_path / "tapestream-notes" / "mine").write_text("mine")
    (tmp_path / "tapestream-notes" / "lock").write_text("{}")  # others have files of that name
    (tmp_path / "tapestream-77-ab_d12yz").mkdir()  # killed before it had a lock
    (tmp_path / "tapestream-results1").mkdir()  # empty, but named by people
    (tmp_path / ".saving-new").mkdir()
    (tmp_path / ".saving-new" / "lock").write_text("")  # before it said whose
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["clean", *words])
    return result.exit_code, result.output


def test_what_killed_runs_have_left_is_listed_then_removed(left: Path) -> None:
    code, text = run(str(left), "--json")
    found = json.loads(text)["found"]
    assert code == 0
    assert len(found) == 4
    assert sum(found.values()) >= (1 << 20) + 10_000
    assert all(Path(path).exists() for path in found)
    code, text = run(str(left), "--remove")
    assert code == 0
    assert "Removed: 1.0" in text
    assert sorted(p.name for p in left.iterdir()) == ["tapestream-notes", "tapestream-results1"]
    live = DiskFolder(left)
    (left / "tapestream-link").symlink_to(live.path)
    code, text = run(str(left), "--remove")
    assert code == 0
    assert "Nothing in" in text
    assert live.path.exists()
    live.close()
    (left / "tapestream-link").unlink()
    assert (left / "tapestream-notes" / "mine").read_text() == "mine"


def test_a_link_to_what_is_left_is_no_folder_of_ours(left: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (target,) = (lock.parent for lock in left.glob("tapestream-[0-9]*/lock"))
    (other / "tapestream-link").symlink_to(target)
    (other / ".saving-link").symlink_to(target)
    code, text = run(str(other), "--remove")
    assert code == 0
    assert "Nothing in" in text
    assert target.exists()


def test_a_link_that_was_taken_for_a_save_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "mine").write_text("x" * 10_000)
    (tmp_path / ".saving-000001-77").symlink_to(archive)
    code, text = run(str(tmp_path), "--remove", "--json")
    assert code == 0
    assert json.loads(text)["found"] == {str(tmp_path / ".saving-000001-77"): 0}
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]
    assert (archive / "mine").exists()


def test_what_may_not_be_removed_is_named(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", refused)
    code, text = run(str(left), "--remove")
    assert code == 2
    assert "could not remove" in text
    assert "Permission denied; remove it as the user whose run it was" in text
    assert len(list(left.glob("tapestream-[0-9]*/lock"))) == 1


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    code, text = run(str(tmp_path / "nowhere"))
    assert code == 2
    assert "is no folder; name one" in text
