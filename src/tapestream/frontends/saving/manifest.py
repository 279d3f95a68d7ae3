"""``manifest.json``: what a save holds. Whatever it says is checked before anything is made of it."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving.shards import Place
from tapestream.frontends.saving.tree import MALFORMED
from tapestream.storage.locked import LOCK
from tapestream.storage.tensor_files import write_text

MANIFEST = "manifest.json"
GENERATORS = "generators"
"""The part that every save has."""
_FORMAT, _VERSION = "tapestream save", 2
_AS_WRITTEN = re.compile(
    rb'\{"crc32": ([0-9]{1,10}), "save": (?=\{"format": "%s", "version": ([0-9]{1,10}),)' % _FORMAT.encode()
)
_TAKEN = ("keep", "path", "progress", "verify", GENERATORS, LOCK)


def check_name(name: str) -> None:
    """Raise InputError for what cannot be the name of a part."""
    if not name.isidentifier():
        raise InputError(f"{name!r} names a folder in the save; use letters, digits and underscores")
    if name in _TAKEN:
        raise InputError(f"{name!r} names a part, but save(), load() and their files use it themselves; choose another")


def write_manifest(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write it; ``parts``: by name, entries as `read_manifest` returns them."""
    manifest = {"format": _FORMAT, "version": _VERSION, "parts": parts}
    write_text(folder / MANIFEST, json.dumps({"crc32": _sum_of(manifest), "save": manifest}))


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """By part, ``tree`` (the JSON of its state), ``tensors`` (their `Place` by name), ``stateful`` (or a plain value),
    and where it was noted ``class`` (names) and ``parameters`` (of an optimizer).

    Raises StorageError, which names the file, where it is missing, damaged or of another kind.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        manifest = found["save"]
        if _sum_of(manifest) != found["crc32"]:
            raise ValueError("its text has changed")
        if manifest["format"] != _FORMAT or not 1 <= manifest["version"] <= _VERSION:
            raise ValueError(f"it says {manifest['format']!r}, version {manifest['version']}")
        parts = {name: _entry(name, entry) for name, entry in manifest["parts"].items()}
        if GENERATORS not in parts or parts[GENERATORS]["stateful"]:
            raise ValueError(f"it has no {GENERATORS}")
    except FileNotFoundError as error:
        raise StorageError(f"{path} is missing; take another save") from error
    except (OSError, *MALFORMED) as error:
        raise StorageError(f"{path} is not a manifest that this version reads ({error}); take another save") from error
    return parts


def is_save(folder: Path) -> bool:
    """Whether a folder is a save of ours, whole but perhaps for its tensors."""
    try:
        text = (folder / MANIFEST).read_bytes()
        found = _AS_WRITTEN.match(text)
        if found and int(found[2]) <= _VERSION and zlib.crc32(text[found.end() : -1]) == int(found[1]):
            return True  # which takes no reading of long lists of tensors
        read_manifest(folder)
    except (OSError, StorageError):
        return False
    return True


def was_save(folder: Path) -> bool:
    """Whether it was one, or is one of a later version: other folders have no part for random generators."""
    return (folder / GENERATORS / f"{GENERATORS}.safetensors").is_file()


def _entry(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is no name of a part")
    if not isinstance(entry.get("class", ""), str):
        raise ValueError(f"the class of {name} is {entry['class']!r}")
    if not isinstance(entry["stateful"], bool):
        raise ValueError(f"stateful is {entry['stateful']!r} for {name}")
    tensors = {tensor: _place(*place) for tensor, place in entry["tensors"].items()}
    return {**entry, "tree": entry["tree"], "tensors": tensors}


def _place(file: str, crc32: int) -> Place:
    if Path(file).name != file or not file.endswith(".safetensors"):
        raise ValueError(f"it names the file {file!r}, outside its folder")
    return Place(file, crc32)


def _sum_of(manifest: Any) -> int:
    return zlib.crc32(json.dumps(manifest).encode())
