"""What `save` writes, `load` brings back: a resumed run is the run that never stopped."""

from collections import OrderedDict
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as some
from running import Run
from torch import nn

import tapestream as ts
from tapestream.frontends.saving import folder as saving_folder
from tapestream.frontends.saving import shards
from tapestream.frontends.saving.folder import Saves
from tapestream.frontends.saving.tree import pack, unpack
from tapestream.system.locks import Lock

RUNS: dict[str, dict[str, Any]] = {
    "disk": {"budget": "1 MiB"},
    "device": {"home": "device"},
    "masters": {"budget": "1 MiB", "bfloat16": True},
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_resumed_run_is_the_run_that_never_stopped(kind: str, tmp_path: Path) -> None:
    whole = Run(tmp_path / "home", **RUNS[kind])
    expected = whole.train(5)
    first = Run(tmp_path / "home", **RUNS[kind])
    losses = first.train(2)
    first.save(tmp_path / "saves")
    first.train(1)  # lost
    second = Run(tmp_path / "home", **RUNS[kind])
    second.train(3)  # all of this is replaced
    second.load(tmp_path / "saves")
    assert second.step == 2
    assert losses + second.train(3) == expected
    assert second.digest() == whole.digest()
    for run in (whole, first, second):
        ts.unstream(run.model)


def test_plain_training_too(tmp_path: Path) -> None:
    """A save of a plain run resumes streamed, and the other way round."""
    plain = Run(None)
    plain.train(2)
    first = plain.save(tmp_path / "saves")
    streamed = Run(tmp_path / "home", budget="1 MiB")
    streamed.load(first)
    assert streamed.digest() == plain.digest()
    expected = streamed.train(1)
    second = streamed.save(tmp_path / "saves")
    plain.load(first)
    assert plain.train(1) == expected
    assert plain.digest() == streamed.digest()
    plain.load(second)
    assert plain.digest() == streamed.digest()
    ts.unstream(streamed.model)


def test_files_are_those_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's folder opens with ``from_pretrained``, and streams with ``weights=``, in several files too."""
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    monkeypatch.setattr(shards, "SHARD_NBYTES", 40_000)
    folder = ts.save(tmp_path / "saves", model=model) / "model"
    assert len(list(folder.glob("*.safetensors"))) > 2
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    with torch.device("meta"):
        hollow = transformers.GPT2LMHeadModel(config)
    streamed = ts.stream(hollow, device="cpu", budget="16 MiB", folder=tmp_path / "home", weights=folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
        assert torch.equal(streamed.state_dict()[name], tensor), name
    back = ts.save(tmp_path / "back", model=streamed) / "model"
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in back.iterdir()) == names
    assert all((back / name).read_bytes() == (folder / name).read_bytes() for name in names)
    ts.unstream(streamed)


def test_tied_parameters_are_written_once(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].weight = model[0].weight
    folder = ts.save(tmp_path, model=model)
    assert (folder / "model" / "model.safetensors").stat().st_size < 1.2 * 64 * 64 * 4
    expected = model[0].weight.detach().clone()
    nn.init.zeros_(model[0].weight)
    ts.load(tmp_path, model=model)
    assert torch.equal(model[1].weight, expected)


def test_only_the_last_saves_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "000000.txt").write_text("mine")
    folders = [ts.save(tmp_path, keep=2, step=i) for i in range(4)]
    assert [f.exists() for f in folders] == [False, False, True, True]
    Saves(tmp_path).settle()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000000.txt", "000003", "000004", "notes"]
    assert ts.load(tmp_path)["step"] == 3
    assert ts.load(folders[2])["step"] == 2
    assert all(p.stat().st_mode & 0o077 == 0 for p in folders[3].rglob("*"))


def test_removal_goes_on_behind_and_the_next_save_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that room is counted when it is there."""
    begun, go, remove = Event(), Event(), saving_folder.remove_locked

    def slowly(path: Path, lock: Lock) -> None:
        begun.set()
        go.wait()
        remove(path, lock)

    monkeypatch.setattr(saving_folder, "remove_locked", slowly)
    first = ts.save(tmp_path, keep=1, step=1)
    second = ts.save(tmp_path, keep=1, step=2)
    assert begun.wait(60)
    assert not first.exists()
    left = [path for path in tmp_path.iterdir() if path != second]
    assert len(left) == 1
    assert Saves(tmp_path).unfinished() == []  # somebody is at work on it
    saving = Thread(target=ts.save, args=(tmp_path,), kwargs={"keep": 1, "step": 3})
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    assert second.exists()
    go.set()
    saving.join()
    Saves(tmp_path).settle()
    assert [path.name for path in tmp_path.iterdir()] == ["000003"]


def test_what_is_pushed_out_has_gone_when_it_is_waited_for(tmp_path: Path) -> None:
    """Also where its lock has just gone, and the empty folder goes next."""
    save = ts.save(tmp_path, step=1)
    (tmp_path / ".saving-000007-1").mkdir()
    Saves(tmp_path).settle()
    assert list(tmp_path.iterdir()) == [save]


def test_a_save_whose_removal_was_cut_short_goes_with_the_next(tmp_path: Path) -> None:
    first = ts.save(tmp_path, step=1)
    first.rename(tmp_path / ".saving-000001-77")  # as a run leaves it that is killed while it removes
    second = ts.save(tmp_path, step=2)
    assert list(tmp_path.iterdir()) == [second]


_leaves = some.one_of(
    some.none(), some.booleans(), some.integers(), some.floats(), some.text(), some.binary(max_size=8),
    some.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu")]),
    some.sampled_from([torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]).map(
        lambda dtype: torch.arange(6).reshape(2, 3).t().to(dtype)
    ),
    some.sampled_from([numpy.arange(3, dtype=numpy.uint32), numpy.float32(0.1), numpy.bool_(True)]),
    some.just(numpy.zeros((0, 2))),
)  # fmt: skip
_keys = some.one_of(some.text(max_size=3), some.integers(0, 3), some.just("$"), some.tuples(some.integers(0, 1)))
_trees = some.recursive(
    _leaves,
    lambda inner: some.one_of(
        some.lists(inner, max_size=3), some.lists(inner, max_size=3).map(tuple),
        some.dictionaries(_keys, inner, max_size=3), some.dictionaries(_keys, inner, max_size=2).map(OrderedDict),
        some.frozensets(some.integers(), max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@given(_trees)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    packed, tensors = pack(tree, "tree")
    assert alike(unpack(shards.json.loads(shards.json.dumps(packed)), tensors.__getitem__), tree)


def alike(a: Any, b: Any) -> bool:
    """Equal in every bit and type; dictionaries of any kind are dictionaries."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and [*map(type, a)] == [*map(type, b)] and all(alike(a[key], b[key]) for key in b)
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray | numpy.generic):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    return a == b or (a != a and b != b)
