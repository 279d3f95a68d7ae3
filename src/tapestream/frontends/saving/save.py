"""`save` and `load`: a training run on the disk, whole or not at all, larger than memory if need be."""

import json
import os
import random
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from torch import nn

from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving.folder import MANIFEST, Saves
from tapestream.frontends.saving.shards import Place, Shards, write_shards
from tapestream.frontends.saving.state import Stateful, state_of
from tapestream.frontends.saving.tree import pack, unpack
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.storage.tensor_files import write_text

_VERSION = 1
_GENERATORS = "generators"
Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""


@runtime_checkable
class _Configuration(Protocol):
    """Of a Hugging Face model."""

    def to_json_string(self) -> str: ...


def save(path: str | os.PathLike[str], *, keep: int = 2, progress: Progress | None = None, **parts: Any) -> Path:
    """Save ``parts`` in a new numbered folder below ``path``; returns that folder.

    ``parts``: by a name of your choice, anything with ``state_dict()`` and ``load_state_dict()``, and plain values
    (numbers, strings, tensors, containers of them), which `load` returns. The states of all random generators go with
    them. Each part is a folder of safetensors files, those of ``model=`` named and indexed as Hugging Face's are;
    ``manifest.json`` has the rest and a checksum of every tensor. Nothing is pickled. Tensors go one by one: no memory
    is needed beyond 12 MiB of buffers (32 MiB for 512 MiB and more) and one tensor that does not lie in row-major
    order. Killed at any moment, the last complete save is there; all but the last ``keep`` are removed once this one is
    complete.

    Raises InputError for what cannot be saved, StorageError when the disk is full (before anything is written) or
    fails.
    """
    if keep < 1:
        raise InputError(f"keep={keep} was asked for; at least one save must be kept: keep=1 or more")
    if not parts or _GENERATORS in parts:
        raise InputError(f"save() needs parts by name (model=model, optimizer=optimizer), none of them {_GENERATORS!r}")
    trees, tensors = _packed({**parts, _GENERATORS: _generators()})
    total, done = _nbytes(tensors), 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress("saving", done, total)

    saves = Saves(path)
    with saves.new(total, keep=keep) as folder:
        places = {}
        for name, found in tensors.items():
            if found:
                (folder / name).mkdir(mode=0o700)
                places[name] = write_shards(folder / name, name, found, written)
        config = getattr(parts.get("model"), "config", None)
        if isinstance(config, _Configuration) and "model" in places:
            write_text(folder / "model" / "config.json", config.to_json_string())
        manifest = _manifest(parts, trees, places)
        write_text(folder / MANIFEST, json.dumps({"crc32": _sum_of(manifest), "save": manifest}))
    return saves.made


def save_nbytes(**parts: Any) -> int:
    """Bytes of the tensors that `save` would write now. Raises InputError for what cannot be saved."""
    return _nbytes(_packed({**parts, _GENERATORS: _generators()})[1])


def load(
    path: str | os.PathLike[str], *, verify: bool = True, progress: Progress | None = None, **parts: Any
) -> dict[str, Any]:
    """Load the latest save below ``path``, or the save ``path`` itself, into ``parts``; returns its plain values.

    ``parts``: objects by the names they were saved under; what is not named is left out. Random generators are set as
    they were. Everything is checked before anything is changed: names, shapes, and unless ``verify=False`` the
    checksums of all tensors.

    Raises InputError where the save is of something else, StorageError where a file is missing, cut short or damaged.
    """
    folder = Saves(path).latest()
    manifest = _read(folder)
    lacking = sorted(parts.keys() - manifest["parts"].keys())
    if lacking:
        raise InputError(f"{folder} holds {', '.join(manifest['parts'])}; {', '.join(lacking)} was asked for")
    wanted = [name for name, entry in manifest["parts"].items() if name in parts or not entry["stateful"]]
    shards = {name: Shards(folder / name, _places(manifest["parts"][name])) for name in wanted}
    if verify:
        _verify(manifest, shards, progress)
    trees = {name: unpack(manifest["parts"][name]["tree"], shards[name].__getitem__) for name in wanted}
    for name, part in parts.items():
        _check_fits(name, part, trees[name], folder)
    for name, part in parts.items():
        copies = isinstance(part, nn.Module | StreamedOptimizer)  # these copy what they are given, others may keep it
        part.load_state_dict(trees[name] if copies else _own(trees[name]))
    _set_generators(trees.pop(_GENERATORS))
    return {name: _own(tree) for name, tree in trees.items() if name not in parts}


def _packed(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """By part, the JSON for its state and the tensors in it."""
    trees: dict[str, Any] = {}
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, part in parts.items():
        _check_name(name)
        trees[name], tensors[name] = pack(state_of(part), name)
    return trees, tensors


def _nbytes(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
    return sum(t.nbytes for found in tensors.values() for t in found.values())


def _manifest(
    parts: Mapping[str, Any], trees: Mapping[str, Any], places: Mapping[str, Mapping[str, Place]]
) -> dict[str, Any]:
    return {
        "format": "tapestream save",
        "version": _VERSION,
        "parts": {
            name: {
                "stateful": isinstance(parts.get(name), Stateful),
                "tree": tree,
                "tensors": {tensor: [p.file, p.crc32] for tensor, p in places.get(name, {}).items()},
            }
            for name, tree in trees.items()
        },
    }


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        manifest: dict[str, Any] = found["save"]
        if _sum_of(manifest) != found["crc32"]:
            raise ValueError("its text has changed")
        if manifest["format"] != "tapestream save" or manifest["version"] > _VERSION:
            raise ValueError(f"it says {manifest['format']!r}, version {manifest['version']}")
        for name in manifest["parts"]:
            _check_name(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is not a manifest that this version reads ({error}); take another save") from error
    return manifest


def _sum_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def _places(entry: Mapping[str, Any]) -> dict[str, Place]:
    found = {name: Place(file, crc32) for name, (file, crc32) in entry["tensors"].items()}
    for place in found.values():
        if Path(place.file).name != place.file:
            raise StorageError(f"the manifest names the file {place.file!r}, outside its folder; take another save")
    return found


def _verify(manifest: Mapping[str, Any], shards: Mapping[str, Shards], progress: Progress | None) -> None:
    total = sum(len(manifest["parts"][name]["tensors"]) for name in shards)
    done = 0
    for name, found in shards.items():
        for tensor in manifest["parts"][name]["tensors"]:
            found.check(tensor)
            done += 1
            if progress is not None:
                progress("checking", done, total)


def _check_fits(name: str, part: Any, tree: Any, folder: Path) -> None:
    if not isinstance(part, Stateful):
        raise InputError(
            f"{name}={type(part).__name__} has no load_state_dict(); leave it out, and take load()[{name!r}]"
        )
    if isinstance(part, nn.Module):
        mine, saved = _shapes(state_of(part)), _shapes(tree)
        if mine.keys() != saved.keys():
            mine = _shapes(part.state_dict())  # saved from one with a module per layer, perhaps
        wrong = sorted(key for key in mine.keys() | saved.keys() if mine.get(key) != saved.get(key))
        if wrong:
            first = wrong[0]
            raise InputError(
                f"{folder} was saved from another {name}: {len(wrong)} of {len(mine.keys() | saved.keys())} tensors "
                f"differ, {first!r} for one ({saved.get(first, 'absent')} saved, {mine.get(first, 'absent')} here); "
                "nothing was changed"
            )
    elif isinstance(part, torch.optim.Optimizer):
        here = [len(group["params"]) for group in part.param_groups]
        there = [len(group["params"]) for group in tree["param_groups"]]
        if here != there:
            raise InputError(
                f"{folder} was saved from another {name}: parameters per group are {there} there and {here} here; "
                "nothing was changed"
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}


def _own(tree: Any) -> Any:
    """The tree with tensors in memory of their own."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def _set_generators(found: Mapping[str, Any]) -> None:
    torch.set_rng_state(found["torch"].clone())
    if len(found["cuda"]) == torch.cuda.device_count():  # saved where there were other devices: these go on as they are
        for number, state in enumerate(found["cuda"]):
            torch.cuda.set_rng_state(state.clone(), number)
    random.setstate(found["python"])
    numpy.random.set_state(found["numpy"])


def _check_name(name: str) -> None:
    if not name.isidentifier():
        raise InputError(f"{name!r} names a folder in the save; use letters, digits and underscores")
