"""What goes wrong is told by name, and nothing is lost or overwritten."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Run
from torch import nn

import tapestream as ts
from tapestream.errors import InputError, StorageError

FILES = (
    "manifest.json",
    "model/model.safetensors",
    "optimizer/optimizer.safetensors",
    "generators/generators.safetensors",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(None)
    run.train(1)
    return run.save(tmp_path_factory.mktemp("saves"))


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "saves" / saved.name))


def refused(save: Path, match: str) -> None:
    """Loading raises StorageError, and changes nothing."""
    run = Run(None)
    run.train(1)
    before, states = run.digest(), (torch.get_rng_state(), run.data.taken)
    with pytest.raises(StorageError, match=match):
        run.load(save)
    assert run.digest() == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert run.data.taken == states[1]


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_byte_is_found(file: str, damaged: Path) -> None:
    path = damaged / file
    whole = path.read_bytes()
    for at in {0, 9, 40, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
        changed = bytearray(whole)
        changed[at] ^= 4
        path.write_bytes(bytes(changed))
        refused(damaged, file)
    path.write_bytes(whole)
    run = Run(None)
    run.load(damaged)


@pytest.mark.parametrize("file", FILES[1:])
@pytest.mark.parametrize("nbytes", [0, 5, 300, -1])
def test_a_file_cut_short_is_named(file: str, nbytes: int, damaged: Path) -> None:
    whole = (damaged / file).read_bytes()
    (damaged / file).write_bytes(whole[:nbytes])
    refused(damaged, file)


@pytest.mark.parametrize("file", FILES[1:])
def test_a_missing_file_is_named(file: str, damaged: Path) -> None:
    (damaged / file).unlink()
    refused(damaged, f"{file} is missing")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"layers": 4}, r"from another model: \d+ of \d+ tensors differ, 'blocks.3"),
        ({"width": 64}, r"in.bias' for one \(\(96,\) saved, \(192,\) here\); nothing was changed"),
    ],
)
def test_a_save_of_another_model_changes_nothing(change: dict[str, Any], match: str, saved: Path) -> None:
    run = Run(None, **change)
    before = run.digest()
    with pytest.raises(InputError, match=match):
        run.load(saved)
    assert run.digest() == before


def test_a_save_of_another_optimizer_changes_nothing(saved: Path) -> None:
    run = Run(None)
    before = run.digest()
    other = torch.optim.AdamW([next(run.model.parameters())])
    with pytest.raises(InputError, match=r"another optimizer: parameters per group are \[\d+\] there and \[1\] here"):
        ts.load(saved, model=run.model, optimizer=other)
    assert run.digest() == before


def test_what_is_missing_is_said(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds model, optimizer, .*; scaler was asked for"):
        ts.load(saved, scaler=nn.Identity())
    with pytest.raises(InputError, match="there is no such folder"):
        ts.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match="there is no complete save in it"):
        ts.load(tmp_path)
    with pytest.raises(InputError, match="keep=0"):
        ts.save(tmp_path, keep=0, step=1)
    with pytest.raises(InputError, match="needs parts by name"):
        ts.save(tmp_path)


@pytest.mark.parametrize("value", [object(), lambda: 0, {"a": [nn.Identity()]}, torch.eye(2).to_sparse()])
def test_what_would_need_pickle_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"extra.* is a "):
        ts.save(tmp_path, extra=value)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ts.save(tmp_path, model=nn.Linear(9, 9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(100))
    with pytest.raises(StorageError, match=r"100 bytes are free on this disk, \d+ are missing"):
        ts.save(tmp_path, model=nn.Linear(9, 9))
    assert list(tmp_path.iterdir()) == [first]


def test_a_disk_that_fills_up_meanwhile_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(9, 9)
    first = ts.save(tmp_path, model=model, keep=1)
    write = os.pwritev

    def full(file: int, data: list[Any], start: int) -> int:
        if len(data[0]) > 200:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, start)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="No space left on device; what was saved before is intact"):
        ts.save(tmp_path, model=model, keep=1)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [first]
    ts.load(tmp_path, model=model)
