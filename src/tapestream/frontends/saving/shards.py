"""The files of one part of a save: tensors in one file or several, as Hugging Face's libraries lay them out."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tapestream.errors import StorageError
from tapestream.optim.shown import StateInParts
from tapestream.storage.tensor_files import checksum, read_tensors, write_tensors, write_text

SHARD_NBYTES = 4 << 30
"""Most bytes of tensors in one file, unless one tensor is larger."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: its file, and the CRC-32 of its dtype, shape and bytes."""

    file: str
    crc32: int


def write_shards(
    folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], written: Callable[[int], None]
) -> dict[str, Place]:
    """Write ``tensors`` to ``stem.safetensors`` in ``folder``, or to numbered files and an index of them, as Hugging
    Face's libraries do. ``written`` is told bytes as they go. Files are on the disk when this returns.

    Raises InputError for a dtype that the format lacks.
    """
    shards = _divided(tensors)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    places: dict[str, Place] = {}
    for name, shard in zip(names, shards, strict=True):
        sums = write_tensors(folder / name, shard, written, _parts)
        places.update({tensor: Place(name, crc32) for tensor, crc32 in sums.items()})
    if len(shards) > 1:
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: place.file for name, place in places.items()}}
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=1))
    return places


class Shards:
    """Tensors in the files of one folder, as `read_tensors` gives them.

    Raises StorageError, which names the file, where one is missing, cut short or not what it should be.
    """

    def __init__(self, folder: Path, places: Mapping[str, Place], *, writable: bool) -> None:
        self._folder, self._places, self._writable = folder, places, writable
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places.get(name)
        if place is None:
            raise StorageError(f"{self._folder} holds no tensor {name!r}, which its manifest names; {_ADVICE}")
        if place.file not in self._tensors:
            try:
                self._tensors[place.file] = read_tensors(self._folder / place.file, writable=self._writable)
            except StorageError as error:
                raise StorageError(f"{error}; {_ADVICE}") from error
        found = self._tensors[place.file].get(name)
        if found is None:
            raise StorageError(f"{self._folder / place.file} holds no tensor {name!r}; {_ADVICE}")
        return found

    def check(self, name: str) -> int:
        """Raise StorageError unless the tensor's bytes are those that were written; returns how many they are."""
        tensor = self[name]
        if checksum(tensor) != self._places[name].crc32:
            raise StorageError(
                f"{self._folder / self._places[name].file}: the bytes of {name!r} have changed; {_ADVICE}"
            )
        return tensor.nbytes


_ADVICE = "this save cannot be used: take an earlier one, or copy the file again"


def _parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    return tensor.pieces() if isinstance(tensor, StateInParts) and tensor.pieces else (tensor,)


def _divided(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_NBYTES
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_NBYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards
