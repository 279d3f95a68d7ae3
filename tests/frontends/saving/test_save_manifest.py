"""A manifest may say anything: what is not of its shape is refused by name, and nothing is changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import StorageError

WEIGHT = "weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("saves")
    return ts.save(folder, model=model, optimizer=optimizer, schedule=schedule, tag=("a", 1.5))


def put(part: str, **entries: Any) -> Callable[[Any], Any]:
    return lambda found: found["parts"][part].update(entries)


def drop(part: str, key: str) -> Callable[[Any], Any]:
    return lambda found: found["parts"][part].pop(key) and None


def place(*found: Any) -> Callable[[Any], Any]:
    return lambda manifest: manifest["parts"]["model"]["tensors"].update({WEIGHT: list(found)})


def tagged(**found: Any) -> Callable[[Any], Any]:
    return put("tag", tree={"$" if key == "kind" else key: value for key, value in found.items()})


EDITS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda found: [1],
    "a text": lambda found: "x",
    "nothing": lambda found: found.clear(),
    "parts as a list": lambda found: found.update(parts=["model"]),
    "version as a text": lambda found: found.update(version="x"),
    "a later version": lambda found: found.update(version=99),
    "no tree": drop("model", "tree"),
    "no tensors": drop("model", "tensors"),
    "no kind of part": drop("tag", "stateful"),
    "no generators": lambda found: found["parts"].pop("generators") and None,
    "a part as null": lambda found: found["parts"].update(model=None),
    "a part outside": lambda found: found["parts"].update({"../x": found["parts"]["model"]}),
    "a class as a list": put("optimizer", **{"class": ["AdamW"]}),
    "a file outside": place("../../x.safetensors", 1),
    "a file above": place("..", 1),
    "an absolute file": place("/etc/x.safetensors", 1),
    "a file as a number": place(5, 1),
    "a file with a NUL": place("a\0b.safetensors", 1),
    "no file": place("", 1),
    "a file too many": place("x.safetensors", 1, 2),
    "other tensors": put("model", tensors={}),
    "generators of another kind": put("generators", tree={}),
    "generators of text": put("generators", tree={"torch": "a", "cuda": [], "python": [], "numpy": 3}),
    "an unknown kind": tagged(kind="other", value=1),
    "no value": tagged(kind="tuple"),
    "a kind as a list": tagged(kind=["tuple"], value=1),
    "a set of lists": tagged(kind="set", value=[[1]]),
    "no base64": tagged(kind="bytes", value="a"),
    "no dtype": tagged(kind="dtype", value="torch.save"),
    "no device": tagged(kind="device", value="zzz"),
    "no number": tagged(kind="number", value=["O", "AAAAAAAAAAA="]),
    "no integer": tagged(kind="int", value=[1]),
    "no pairs": tagged(kind="ordered", value=[[1]]),
    "a tensor as a list": tagged(kind="tensor", value=[1]),
    "an unknown tensor": tagged(kind="tensor", value="x"),
    "a model as a list": put("model", tree=[1]),
    "a complex weight": put("model", tree={WEIGHT: {"$": "tensor", "value": "bias", "complex": True}}),
    "a schedule as a number": put("schedule", tree=3),
    "an optimizer as a number": put("optimizer", tree=3),
    "groups as a number": put("optimizer", tree={"param_groups": 3, "state": {}}),
    "groups of numbers": put("optimizer", tree={"param_groups": [3], "state": {}}),
    "no state": lambda found: found["parts"]["optimizer"]["tree"].pop("state") and None,
    "state as a list": lambda found: found["parts"]["optimizer"]["tree"].update(state=[1]),
    "state of numbers": lambda found: found["parts"]["optimizer"]["tree"].update(
        state={"$": "dict", "value": [[0, 3], [1, 3]]}
    ),
    "too few parameters": put("optimizer", parameters=[]),
    "parameters as numbers": put("optimizer", parameters=[1, 2]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused_by_name(edit: str, saved: Path, tmp_path: Path) -> None:
    """Though its checksum is right."""
    path = Path(shutil.copytree(saved, tmp_path / saved.name)) / "manifest.json"
    found = json.loads(path.read_text())["save"]
    found = EDITS[edit](found) or found
    path.write_text(json.dumps({"crc32": crc32(json.dumps(found).encode()), "save": found}))
    refused(tmp_path, "manifest")


@pytest.mark.parametrize(
    "text", ["hello", "", "[]", "null", "[" * 100_000, '{"crc32":' + "9" * 5000 + ',"save":{}}', "\ud800"]
)
def test_a_damaged_manifest_is_refused_by_name(text: str, saved: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(saved, tmp_path / saved.name)) / "manifest.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    refused(tmp_path, r"000001/manifest.json is not a manifest that this version reads \(.*\); take another save")


def refused(folder: Path, match: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before, random = model.weight.clone(), torch.get_rng_state()
    with pytest.raises(StorageError, match=match):
        ts.load(folder, model=model, optimizer=optimizer, schedule=schedule)
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
