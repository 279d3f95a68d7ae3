"""What `to_dcp` writes and `from_dcp` reads: the files of PyTorch's Distributed Checkpoint, a tensor at a time."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from tapestream.errors import InputError, StorageError, TapestreamError
from tapestream.frontends.saving.folder import Saves
from tapestream.optim.shown import StateInParts, read_when_asked
from tapestream.system.files import sync_folder

METADATA = ".metadata"
"""The file that names all others."""
_FILE_NBYTES = 64 << 20  # PyTorch's writer keeps what it has written until its file is complete


class PlannerInTurn(DefaultSavePlanner):
    """Plans with stand-ins without values: tensors are read when they are written, in the order of ``given``."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """See `SavePlanner`."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.given = {name: value for name, value in self.state_dict.items() if isinstance(value, torch.Tensor)}
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in self.given.items()}
        self.state_dict = {**self.state_dict, **empty}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See `DefaultSavePlanner`."""
        value = self.given.get(index.fqn, self.state_dict[index.fqn])
        return value.read() if isinstance(value, StateInParts) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """See `DefaultSavePlanner`. Raises InputError for what cannot be pickled."""
        try:
            return super().transform_object(write_item, object)
        except Exception as error:  # of whatever class's pickling
            raise InputError(
                f"{write_item.index.fqn!r} is a {type(object).__name__} that cannot be pickled ({error}), as DCP keeps "
                "what is no tensor; leave it out of the state"
            ) from error


def write_checkpoint(folder: Path, planner: PlannerInTurn) -> Path:
    """Write what ``planner`` has been given to a new or empty folder, as ``dcp.save()`` does in one process; return it.
    Raises StorageError."""
    with Saves(folder.parent).beside(sum(t.nbytes for t in planner.given.values())) as work:
        made = work / "checkpoint"
        try:
            with torch.no_grad():
                _write_files(made, planner)
            sync_folder(made)
            if folder.exists():  # it was empty
                folder.rmdir()
            made.rename(folder)
            sync_folder(folder.parent)
        except TapestreamError:
            raise
        except (OSError, RuntimeError) as error:  # PyTorch's own, where its file could not be written
            raise StorageError(f"could not write the checkpoint {folder}: {error}; there is none") from error
    return folder


def _write_files(folder: Path, planner: PlannerInTurn) -> None:
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # which would write in another order, on a GPU
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = []
    for number, items in enumerate(_by_file(plan.items)):
        prefix = dataclasses.replace(plan.storage_data, prefix=f"__0_{number}_")
        written = writer.write_data(dataclasses.replace(plan, items=items, storage_data=prefix), planner)
        results.append(written.wait())
    writer.finish(metadata, results)


def _by_file(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """``items`` in their order, a file's after the other's."""
    found: list[WriteItem] = []
    room = _FILE_NBYTES
    for item in items:
        data = item.tensor_data
        nbytes = 0 if data is None else data.size.numel() * data.properties.dtype.itemsize
        if nbytes > room and found:
            yield found
            found, room = [], _FILE_NBYTES
        found.append(item)
        room -= nbytes
    yield found


class StoredByDcp:
    """A checkpoint, of which tensors are read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError for a folder that holds none, StorageError where it cannot be read."""
        self._folder, self._reader = folder, FileSystemReader(folder)
        if not (folder / METADATA).is_file():
            what = f"no {METADATA} in it" if folder.is_dir() else "no such folder"
            raise InputError(
                f"{folder} was to be loaded as a checkpoint of torch.distributed.checkpoint, but there is {what}; name "
                "the folder that dcp.save() or ts.to_dcp() wrote (ts.load() loads what ts.save() has saved)"
            )
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:  # what was pickled may be anything
            raise StorageError(f"{folder / METADATA} cannot be read ({error!r}); take another checkpoint") from error
        if not isinstance(self._metadata, Metadata) or not isinstance(self._metadata.planner_data, dict):
            raise InputError(
                f"{folder} does not tell the layout of what it holds (it was written with flatten_state_dict=False, or "
                "by another planner); write it with dcp.save({'model': ..., 'optim': ...})"
            )
        self._reader.set_up_storage_reader(self._metadata, True)
        self._kept: tuple[object, dict[str, torch.Tensor]] = (None, {})

    def tree(self, *tops: str) -> dict[str, Any]:
        """What lies under these names; tensors of several numbers come when they are read. Raises StorageError."""
        paths = {key: path for key, path in self._metadata.planner_data.items() if path[0] in tops}
        values = {key: self._value(key, path[:3]) for key, path in paths.items()}
        found: dict[str, Any] = unflatten_state_dict(values, paths)
        return found

    def check_files(self) -> None:
        """Raise StorageError where a file is missing or too short."""
        ends: dict[str, int] = {}
        for place in self._metadata.storage_data.values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            path = self._folder / name
            there = path.stat().st_size if path.is_file() else None
            if there is None or there < end:
                what = "is missing" if there is None else f"ends after {there} bytes, {end} are needed"
                raise StorageError(f"{path} {what}; copy the checkpoint again, or take another; nothing was changed")

    def _value(self, key: str, owner: object) -> Any:
        stored = self._metadata.state_dict_metadata[key]
        if not isinstance(stored, TensorStorageMetadata) or stored.size.numel() <= 1:
            return self._read(key)
        return read_when_asked(stored.size, stored.properties.dtype, lambda: self._kept_of(owner, key))

    def _kept_of(self, owner: object, key: str) -> torch.Tensor:
        """What is read several times, in turn with other state of the same parameter, is kept for that long."""
        if self._kept[0] != owner:
            self._kept = owner, {}
        if key not in self._kept[1]:
            self._kept[1][key] = self._read(key)
        return self._kept[1][key]

    def _read(self, key: str) -> Any:
        stored, value = self._metadata.state_dict_metadata[key], None
        if isinstance(stored, TensorStorageMetadata):
            value = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != value.numel():
                raise StorageError(f"{self._folder} holds a part of {key!r} alone; take another checkpoint")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({key: value}, self._metadata, True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        except Exception as error:  # whatever damaged bytes lead PyTorch to
            raise StorageError(
                f"{key!r} of {self._folder} cannot be read ({error!r}); take another checkpoint"
            ) from error
        return planner.state_dict[key]
