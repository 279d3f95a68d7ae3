"""Only what says that it is a save of ours is counted, removed, numbered after or loaded."""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving.folder import Saves
from tapestream.storage.locked import remove_locked


def names(folder: Path) -> list[str]:
    Saves(folder).settle()
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("text", ["{}", '{"my web app": 1}', "not JSON", "[" * 100_000, '{"save": {"format": "mine"}}'])
def test_folders_of_others_are_let_alone(text: str, tmp_path: Path) -> None:
    for name in ("000002", "20240101"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
        (tmp_path / name / "thesis.txt").write_text("years of work")
    (tmp_path / "000003").mkdir()  # empty
    (tmp_path / "000004").symlink_to("nowhere")
    with pytest.raises(InputError, match="no complete save in it"):
        ts.load(tmp_path)
    made = [ts.save(tmp_path, keep=1, step=step).name for step in range(3)]
    assert made == ["000001", "000005", "000006"]
    assert ts.load(tmp_path)["step"] == 2
    assert names(tmp_path) == ["000002", "000003", "000004", "000006", "20240101"]
    assert all((tmp_path / name / "thesis.txt").exists() for name in ("000002", "20240101"))


def test_a_folder_of_saves_may_have_a_manifest_of_its_own(tmp_path: Path) -> None:
    ts.save(tmp_path, step=1)
    (tmp_path / "manifest.json").write_text('{"my web app": 1}')
    assert ts.load(tmp_path)["step"] == 1


@pytest.mark.parametrize("damage", ["flipped", "missing", "later"])
def test_a_damaged_save_is_named_and_never_removed(damage: str, tmp_path: Path) -> None:
    """Nor does it take the place of a whole one."""
    ts.save(tmp_path, step=1)
    path = ts.save(tmp_path, step=2) / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace("tapestream save", "tapestream sane") if damage == "flipped" else text)
    if damage == "missing":
        path.unlink()
    if damage == "later":
        path.write_text(text.replace('"version": ', '"version": 9'))
    for named in (tmp_path, path.parent):
        with pytest.raises(StorageError, match=r"000002/manifest\.json is .*; take another save"):
            ts.load(named)
    assert [ts.save(tmp_path, keep=2, step=step).name for step in (3, 4)] == ["000003", "000004"]
    assert names(tmp_path) == ["000002", "000003", "000004"]
    assert ts.load(tmp_path)["step"] == 4


def test_a_link_to_a_save_is_loaded_and_never_emptied(tmp_path: Path) -> None:
    """Nor what it leads to; the next save is numbered after it, and it takes the place of none."""
    archived = ts.save(tmp_path / "archive", step=0)
    saves = tmp_path / "saves"
    saves.mkdir()
    (saves / "000007").symlink_to(archived)
    assert ts.load(saves)["step"] == 0
    before = sorted(archived.rglob("*"))
    assert [ts.save(saves, keep=1, step=step).name for step in (1, 2)] == ["000008", "000009"]
    assert names(saves) == ["000007", "000009"]
    assert sorted(archived.rglob("*")) == before
    assert ts.load(saves)["step"] == 2
    (saves / "000010").symlink_to(saves / "000009")
    with pytest.raises(NotADirectoryError):
        remove_locked(saves / "000010")
    assert ts.load(saves)["step"] == 2


def test_what_removals_have_left_is_cleaned(tmp_path: Path) -> None:
    """Links too, as the first version left them when it had taken one for a save."""
    archived = ts.save(tmp_path / "archive", step=0)
    for name, target in ((".saving-000001-77", archived), (".saving-000002-77", tmp_path / "gone")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / ".saving-000003-77").mkdir()  # all but removed
    (tmp_path / ".saving-mine").symlink_to(archived)
    ts.save(tmp_path, step=1)
    assert names(tmp_path) == [".saving-mine", "000001", "archive"]
    assert ts.load(archived)["step"] == 0


@pytest.mark.parametrize("name", ["lock", "generators", "verify", "a/b", ""])
def test_names_that_are_taken_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"choose another|letters, digits"):
        ts.save(tmp_path, **{name: torch.ones(2)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True, None])
def test_only_whole_numbers_of_saves_are_kept(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"keep={keep!r} was asked for"):
        ts.save(tmp_path, keep=keep, step=1)
    with pytest.raises(InputError, match="progress=3 cannot be called"):
        ts.save(tmp_path, progress=3, step=1)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [None, 3, b"saves", "a\0b", Path("a\0b")])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (ts.save, ts.load):
        with pytest.raises(InputError, match="was given as the folder of saves; give its path"):
            call(path, model=nn.Linear(2, 2))


def test_a_save_of_the_first_version_is_loaded(tmp_path: Path) -> None:
    """It noted neither classes nor the versions of modules."""
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    path = ts.save(tmp_path, model=model, optimizer=optimizer, step=3) / "manifest.json"
    found = json.loads(path.read_text())["save"]
    for entry in found["parts"].values():
        entry.pop("class", None)
        entry.pop("parameters", None)
    tree = found["parts"]["model"]["tree"]
    found["parts"]["model"]["tree"] = dict(tree["value"])
    found["version"] = 1
    path.write_text(json.dumps({"crc32": crc32(json.dumps(found).encode()), "save": found}))
    rule = torch.optim.SGD(other.parameters(), momentum=0.9)
    assert ts.load(tmp_path, model=other, optimizer=rule) == {"step": 3}
    assert torch.equal(other.weight, model.weight)
