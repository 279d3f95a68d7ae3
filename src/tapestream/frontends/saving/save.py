"""`save` and `load`: a training run on the disk, whole or not at all, larger than memory if need be."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving import generators
from tapestream.frontends.saving.fits import check_fits, check_given, notes_of
from tapestream.frontends.saving.folder import Saves
from tapestream.frontends.saving.manifest import GENERATORS, MANIFEST, check_name, read_manifest, write_manifest
from tapestream.frontends.saving.shards import Place, Shards, write_shards
from tapestream.frontends.saving.state import is_stateful, only_copies
from tapestream.frontends.saving.together import (
    check_loaded_together,
    check_stepped,
    generators_to_save,
    loading,
    ranks_that_share,
    saved_together,
    state_to_save,
)
from tapestream.frontends.saving.tree import MALFORMED, pack, unpack
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.peers.agreement import Agreement
from tapestream.storage.tensor_files import write_text

Progress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""
_COPYING = nn.Module, StreamedOptimizer  # they copy what they are given, others keep it


@runtime_checkable
class _Configuration(Protocol):
    """Of a Hugging Face model."""

    def to_json_string(self) -> str: ...


def save(path: str | os.PathLike[str], *, keep: int = 2, progress: Progress | None = None, **parts: Any) -> Path:
    """Save ``parts`` in a new numbered folder below ``path``; return that folder.

    ``parts``: by names of your choice, objects with ``state_dict()`` and ``load_state_dict()``, and plain values
    (numbers, strings, tensors, containers of them), which `load` returns. The states of all random generators are saved
    too. Each part is a folder of safetensors files; those of ``model=`` are named and indexed as Hugging Face's are.
    ``manifest.json`` has the rest, and a checksum of every tensor. Nothing is pickled. Tensors are written one by one.
    The memory needed is 36 MiB of buffers (52 MiB for 512 MiB and more), one tensor that does not lie in row-major
    order, and those that are conjugated or negated views. If the process is killed at any moment, the last complete
    save is there. Once this save is complete, all but the last ``keep`` are removed.

    Where ranks divide a model's blocks (``Peers(shard=True)``) every rank must save, and the first one writes: what one
    process would, whole tensors, so that any number of ranks can go on from there, and the random generators of all.

    Raises InputError for what cannot be saved, StorageError if the disk is full (before anything is written) or fails.
    """
    saves = Saves(path)
    if type(keep) is not int or keep < 1:
        raise InputError(f"keep={keep!r} was asked for; it is how many saves to keep, at least one: keep=1 or more")
    if progress is not None and not callable(progress):
        raise InputError(f"progress={progress!r} cannot be called; give a function, and a part another name")
    if not parts:
        raise InputError("save() needs parts by name: model=model, optimizer=optimizer")
    ranks = ranks_that_share(parts.values())
    trees, tensors = _packed(parts, ranks)
    if ranks is not None:
        return saved_together(ranks, tensors, saves, lambda: _write(saves, keep, progress, parts, trees, tensors))
    return _write(saves, keep, progress, parts, trees, tensors)


def _write(
    saves: Saves, keep: int, progress: Progress | None, parts: Mapping[str, Any], trees: Mapping[str, Any],
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
) -> Path:  # fmt: skip
    total, done = _nbytes(tensors), 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress("saving", done, total)

    with saves.new(total, keep=keep) as folder:
        places = {}
        for name, found in tensors.items():
            if found:
                (folder / name).mkdir(mode=0o700)
                places[name] = write_shards(folder / name, name, found, written)
        config = getattr(parts.get("model"), "config", None)
        if isinstance(config, _Configuration) and "model" in places:
            write_text(folder / "model" / "config.json", config.to_json_string())
        write_manifest(folder, {name: _entry(parts.get(name), trees[name], places.get(name, {})) for name in trees})
    return saves.made


def save_nbytes(**parts: Any) -> int:
    """Bytes of the tensors that `save` would write now. Raises InputError for what cannot be saved."""
    return _nbytes(_packed(parts, None)[1])


def load(
    path: str | os.PathLike[str], *, verify: bool = True, progress: Progress | None = None, **parts: Any
) -> dict[str, Any]:
    """Load the latest save below ``path``, or the save ``path`` itself, into ``parts``; return its plain values.

    ``parts``: objects by the names they were saved under; what is not named is left out. Random generators are set to
    their saved states: where ranks load together (see `save`), to those of each, or, if another number of ranks saved,
    to new ones on all but the first, which a warning says. Everything is checked before anything is changed: classes,
    names, shapes, dtypes, and the checksums of all tensors unless ``verify=False``.

    Raises InputError if the save is of something else, StorageError if a file is missing, cut short or damaged.
    """
    folder = Saves(path).latest()
    entries = read_manifest(folder)
    lacking = sorted(parts.keys() - entries.keys())
    if lacking:
        raise InputError(f"{folder} holds {', '.join(entries)}; {', '.join(lacking)} was asked for")
    for name, part in parts.items():
        check_given(name, part, entries[name], folder)
    ranks = ranks_that_share(parts.values())
    check_loaded_together(ranks, folder / MANIFEST, parts)
    shards = {
        name: Shards(folder / name, entry["tensors"], writable=not only_copies(parts.get(name)))
        for name, entry in entries.items()
        if name in parts or not entry["stateful"]
    }
    if verify:
        _verify(entries, shards, progress)

    def state(name: str, *, own: bool) -> Any:
        tensors = shards[name]
        try:
            return unpack(entries[name]["tree"], lambda key: tensors[key].clone() if own else tensors[key])
        except MALFORMED as error:
            raise StorageError(f"{folder / MANIFEST}: {name} cannot be read ({error}); take another save") from error

    states = _generators(folder, state(GENERATORS, own=True), ranks)
    for name, part in parts.items():
        check_fits(name, part, entries[name], state(name, own=False), folder)
    values = {name: state(name, own=True) for name in shards if name not in parts and name != GENERATORS}
    for name in sorted(parts, key=lambda name: _never_refuses(parts[name])):
        with loading(ranks):
            parts[name].load_state_dict(state(name, own=not isinstance(parts[name], _COPYING)))
    generators.set_states(states)
    return values


def _never_refuses(part: Any) -> bool:
    """Whether its state was checked all through. What others have written may raise, so it comes first: then little
    else has changed."""
    return isinstance(part, nn.Module | torch.optim.Optimizer) and only_copies(part)


def _packed(
    parts: Mapping[str, Any], ranks: Agreement | None
) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """By part, the JSON for its state and the tensors in it; the random generators' too, of all ``ranks`` that save."""
    for name in parts:
        check_name(name)
    check_stepped(parts.values(), "ts.save()")
    states = {**{name: state_to_save(part) for name, part in parts.items()}, GENERATORS: generators_to_save(ranks)}
    packed = {name: pack(state, name) for name, state in states.items()}
    return {name: tree for name, (tree, _) in packed.items()}, {name: found for name, (_, found) in packed.items()}


def _nbytes(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> int:
    return sum(t.nbytes for found in tensors.values() for t in found.values())


def _entry(part: Any, tree: Any, places: Mapping[str, Place]) -> dict[str, Any]:
    """What the manifest says of a part."""
    stateful = is_stateful(part)
    notes = notes_of(part) if stateful else {}
    return {
        "stateful": stateful,
        **notes,
        "tree": tree,
        "tensors": {name: [place.file, place.crc32] for name, place in places.items()},
    }


def _verify(entries: Mapping[str, Any], shards: Mapping[str, Shards], progress: Progress | None) -> None:
    total = sum(len(entries[name]["tensors"]) for name in shards)
    done = 0
    for name, found in shards.items():
        for tensor in entries[name]["tensors"]:
            found.check(tensor)
            done += 1
            if progress is not None:
                progress("checking", done, total)


def _generators(folder: Path, found: Any, ranks: Agreement | None) -> Any:
    """What of ``found`` is this process's, once it is sure that it can be set."""
    try:
        found = generators.of_rank(found, *((0, 1) if ranks is None else (ranks.rank, ranks.size)))
        generators.check_states(found)
    except MALFORMED as error:
        raise StorageError(
            f"{folder / MANIFEST}: {GENERATORS} is not the state of random generators ({error}); take another save"
        ) from error
    return found
