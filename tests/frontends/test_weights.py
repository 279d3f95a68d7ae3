"""Weights of files: read into models on meta, matched strictly, one block at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from safetensors.torch import save_file
from streamable import MODELS, WIDTH, Chained, Dense, Model, dense, numbers
from streaming import DIRECT, everything
from torch import nn

import tapestream as ts
from tapestream.errors import InputError, StorageError

CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
LAST = "blocks.5.linear.weight"


def save(model: nn.Module, path: Path, **changes: torch.Tensor | None) -> Path:
    """One file of ``model``, with ``changes``: None leaves a tensor out."""
    tensors = everything(model) | changes
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, path)
    return path


def save_parts(model: nn.Module, folder: Path) -> Path:
    """Two files and their index."""
    folder.mkdir()
    found: dict[str, str] = {}
    tensors = everything(model)
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, folder / f"part-{number}.safetensors")
        found |= dict.fromkeys(names, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
    return folder


def on_meta(case: Model) -> nn.Module:
    with torch.device("meta"):
        return case.model()


def read(model: nn.Module, weights: Any, folder: Path) -> nn.Module:
    return ts.stream(model, device="cpu", machine=DIRECT, budget="1 MiB", folder=folder, weights=weights)


SOURCES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "file": lambda model, path: str(save(model, path / "a.safetensors")),
    "folder": lambda model, path: save(model, path / "a.safetensors").parent,
    "parts": lambda model, path: save_parts(model, path / "parts"),
    "files": lambda model, path: sorted(save_parts(model, path / "parts").glob("part-*")),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["gpt", "resnet", "sequential", "double"])
def test_every_source(source: str, name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    plain, ours = case.model(), on_meta(case)
    read(ours, SOURCES[source](plain, tmp_path), tmp_path / "home")
    assert_same(everything(plain), everything(ours))
    ts.unstream(ours)


def test_real_models_are_overwritten_and_stay_the_same_objects(tmp_path: Path) -> None:
    plain, ours = CASE.model(), CASE.make()
    parameters = list(ours.parameters())
    read(ours, save(plain, tmp_path / "a.safetensors"), tmp_path / "home")
    assert_same(everything(plain), everything(ours))
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True))
    ts.unstream(ours)


def test_the_model_says_the_dtype(tmp_path: Path) -> None:
    plain, ours = CASE.model(), on_meta(CASE).bfloat16()
    read(ours, save(plain, tmp_path / "a.safetensors"), tmp_path / "home")
    assert_same(everything(plain.bfloat16()), everything(ours))
    ts.unstream(ours)


@pytest.mark.parametrize("left_out", ["linear", "blocks.2.linear"])
def test_tied_weights_need_one_of_their_names(left_out: str, tmp_path: Path) -> None:
    def tied() -> nn.Module:
        blocks = dense()
        blocks[2].linear.weight = blocks[0].linear.weight
        return Chained(blocks)

    torch.manual_seed(1)
    plain = tied()
    with torch.device("meta"):
        ours = tied()
    ours.blocks[1].requires_grad_(False)
    gone = "blocks.0.linear.weight" if left_out == "linear" else "blocks.2.linear.weight"
    read(ours, save(plain, tmp_path / "a.safetensors", **{gone: None}), tmp_path / "home")
    assert ours.blocks[0].linear.weight is ours.blocks[2].linear.weight
    assert [p.requires_grad for p in ours.blocks[1].parameters()] == [False, False]
    assert_same(everything(plain), everything(ours))
    ts.unstream(ours)


class Turned(Dense):
    """Has a table that is never saved, which its own code makes."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        if resets:
            self.reset_parameters = self.tabulate
        self.tabulate()

    def tabulate(self) -> None:
        self.table.copy_(torch.arange(WIDTH) * 0.1)


def test_buffers_that_are_not_saved_are_made_by_the_models_own_code(tmp_path: Path) -> None:
    case = Model(lambda: Chained([Turned() for _ in range(4)]), numbers(3, WIDTH))
    plain, ours = case.model(), on_meta(case)
    read(ours, save(plain, tmp_path / "a.safetensors"), tmp_path / "home")
    assert_same(dict(plain.named_buffers()), dict(ours.named_buffers()))
    assert_same(everything(plain), everything(ours))
    ts.unstream(ours)
    silent = Model(lambda: Chained([Turned(resets=False) for _ in range(4)]), numbers(3, WIDTH))
    ours = on_meta(silent)
    for block in ours.blocks:
        block.reset_parameters = lambda: None
    with pytest.raises(InputError, match=r"buffer 'table' of a Turned is not in the weights.*reset_parameters"):
        read(ours, tmp_path / "a.safetensors", tmp_path / "home")
    assert not any((tmp_path / "home").iterdir())


def test_one_error_lists_all_that_does_not_fit(tmp_path: Path) -> None:
    changes = {
        LAST: None, "blocks.0.linear.bias": torch.zeros(3), "blocks.1.linear.bias": torch.zeros(WIDTH).long(),
        "stranger": torch.zeros(1),
    }  # fmt: skip
    path = save(CASE.model(), tmp_path / "a.safetensors", **changes)
    ours = on_meta(CASE)
    with pytest.raises(InputError) as found:
        read(ours, path, tmp_path / "home")
    for text in (
        f"1 missing from the files: {LAST};",
        "1 not in the model: stranger;",
        "2 of another shape or kind: blocks.0.linear.bias (floating-point [3] for floating-point [16]), "
        "blocks.1.linear.bias (other [16] for floating-point [16]);",
    ):
        assert text in str(found.value)
    assert type(ours) is Chained
    assert all(p.is_meta for p in ours.parameters())


def test_sources_that_are_none(tmp_path: Path) -> None:
    path = save(CASE.model(), tmp_path / "a.safetensors")
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "model.bin"
    torch.save({}, pickled)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(path.read_bytes()[:-64])
    parts = save_parts(CASE.model(), tmp_path / "parts")
    (parts / "part-1.safetensors").unlink()
    strange = save_parts(CASE.model(), tmp_path / "strange")
    (strange / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    damaged = [save_parts(CASE.model(), tmp_path / f"damaged-{number}") for number in range(4)]
    for folder, text in zip(damaged, ('{"weight_map": {"a', "[]", '{"weight_map": []}', "\x00"), strict=True):
        (folder / "model.safetensors.index.json").write_text(text)
    for source, error, text in (
        *((folder, InputError, "index.json is not an index of safetensors files .*; save") for folder in damaged),
        (tmp_path / "nowhere", InputError, "there is no such file or folder"),
        (tmp_path / "empty", InputError, "0 .safetensors files and 0 indices; save with save_pretrained"),
        (pickled, InputError, "is not a .safetensors file; no other kind is read"),
        (
            broken,
            StorageError,
            r"broken.safetensors is not a whole safetensors file \(it ends after .* needed\); copy or save it again",
        ),
        (parts, InputError, "names 'part-1.safetensors', which is not a file beside it"),
        (strange, InputError, "names '../a.safetensors', which is not a file beside it"),
        ([path, path], InputError, "'after.*' is in two files of weights|is in two files of weights"),
    ):
        with pytest.raises(error, match=text):
            read(on_meta(CASE), source, tmp_path / "home")


def test_reading_takes_two_blocks_of_memory(tmp_path: Path) -> None:
    """One that is being read, and one on its way to the disk, which the device's budget counts."""
    wide = Model(lambda: Chained([Dense(256) for _ in range(12)]), numbers(3, 256))
    tensors = everything(wide.model())
    for number in range(12):  # the meter counts the whole of a file that is mapped
        mine = {name: t for name, t in tensors.items() if name.startswith(f"blocks.{number}.")}
        save_file(mine, tmp_path / f"{number}.safetensors")
    block = sum(t.nbytes for t in mine.values())
    ours = on_meta(wide)
    with ts.track_memory() as meter:
        read(ours, tmp_path, tmp_path / "home")
    assert meter.peak_nbytes < 3.5 * block
    assert meter.end_nbytes < block
    assert_same(tensors, everything(ours))
    ts.unstream(ours)


def test_a_model_of_which_a_part_was_never_loaded(tmp_path: Path) -> None:
    plain, ours = CASE.model(), on_meta(CASE)
    there = {name: tensor for name, tensor in plain.state_dict().items() if not name.startswith("blocks.3.")}
    ours.load_state_dict(there, strict=False, assign=True)
    with pytest.raises(InputError, match=r"2 tensors .*'blocks.3.linear.weight' first\) are on the meta.*weights="):
        read(ours, None, tmp_path / "home")
    read(ours, save(plain, tmp_path / "a.safetensors"), tmp_path / "home")  # what the error says
    assert_same(everything(plain), everything(ours))
    ts.unstream(ours)


def test_weights_that_hooks_bring(tmp_path: Path) -> None:
    """As accelerate leaves a model: all on meta, and a hook on each module."""
    ours = on_meta(CASE)
    for module in ours.modules():
        module._hf_hook = object()
    with pytest.raises(InputError, match=r"away, in the care of accelerate's hooks.*load the model without these"):
        read(ours, None, tmp_path / "home")
    with pytest.raises(InputError, match="accelerate's hooks"):
        read(ours, save(CASE.model(), tmp_path / "a.safetensors"), tmp_path / "home")
    ours = CASE.model()
    for module in ours.modules():
        module._hf_hook = object()  # all are there: nothing is brought
    ts.unstream(read(ours, None, tmp_path / "home"))


def test_weights_that_are_drawn_are_told_of(tmp_path: Path) -> None:
    ours = on_meta(Model(lambda: Chained([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]), numbers(3, 4)))
    with pytest.warns(UserWarning, match=r"lay on the meta device and no weights=.*for 3 modules \(Linear\)") as told:
        read(ours, None, tmp_path / "home")
    assert told[0].filename == __file__
    ts.unstream(ours)


class Redrawn(nn.Linear):
    """Its own code fills the table that is never saved, and the weights with it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "table"):
            self.table.fill_(1)


@pytest.mark.parametrize("by", ["reset_parameters", "initialize"])
def test_what_has_values_keeps_them(by: str, tmp_path: Path) -> None:
    case = Model(lambda: Chained([Redrawn() for _ in range(3)]), numbers(3, WIDTH))
    plain, ours = case.model(), on_meta(case)
    ours.load_state_dict(plain.state_dict(), assign=True)
    if by == "initialize":
        for block in ours.blocks:
            block.initialize = block.reset_parameters
    read(ours, None, tmp_path / "home")
    assert_same(everything(plain), everything(ours))
    assert_same(dict(plain.named_buffers()), dict(ours.named_buffers()))
    ts.unstream(ours)
