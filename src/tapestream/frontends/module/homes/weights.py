"""`Weights`: saved weights, read tensor by tensor from safetensors files straight to where a model has them."""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from tapestream.errors import InputError, StorageError
from tapestream.frontends.module.homes.converted import Origin, ignored, is_converted, origins
from tapestream.frontends.saving.state import Few, in_other_groups
from tapestream.storage.tensor_files import read_tensors

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A safetensors file, several, or a folder of them as ``save_pretrained`` writes it."""

_SHOWN = 8  # names of each kind in an error


class Weights:
    """The tensors of ``source``, matched by name with the parameters and persistent buffers of ``model``.

    Names are those of the model; for Hugging Face models also all that ``from_pretrained`` would find in the files.
    Tied parameters need one of their names; layers that are groups in the model may be in the files one by one. Of a
    Hugging Face model, what lies beside the lists of ``blocks`` (a new head) may be missing from the files, and these
    may have more there: both are warned about by name. Nothing but headers is read at first.

    Raises InputError that lists all names and shapes which do not match, StorageError for a file that cannot be read.
    """

    def __init__(self, source: Source, model: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        self._file_of: dict[str, Path] = {}
        self._names: dict[tuple[int, str], str] = {}  # by a module's id and its tensor's name there
        self._one_by_one: dict[int, str] = {}  # groups that the files have by layers: their names, by id
        headers: dict[str, torch.Tensor] = {}
        for path in files_of(source):
            for name, tensor in _read(path).items():
                if name in headers:
                    raise InputError(
                        f"{name!r} is in two files of weights, {self._file_of[name]} and {path}; name one of them"
                    )
                self._file_of[name] = path
                headers[name] = tensor.to("meta")
        self._origins, found = origins(model, headers)
        self._match(model, _beside(model, blocks), {name: _described(tensor) for name, tensor in found.items()})

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether the files have this tensor of this module."""
        return (id(module), name) in self._names or id(module) in self._one_by_one

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Read everything that the files have of these modules' own tensors into them, as the dtype they have there."""
        wanted: dict[Path, list[tuple[Origin, torch.Tensor]]] = {}
        filled: set[int] = set()
        for module in modules:
            for key, tensor in self._keyed(module):
                if id(tensor) not in filled:
                    filled.add(id(tensor))
                    origin = self._origins[key]
                    wanted.setdefault(self._file_of[origin.all_keys[0]], []).append((origin, tensor))
        for first, tensors in wanted.items():
            files = {first} | {self._file_of[key] for origin, _ in tensors for key in origin.all_keys}
            found = {key: tensor for path in files for key, tensor in _read(path).items()}
            for origin, tensor in tensors:
                origin.read(found, tensor)

    def _keyed(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """A module's own tensors that the files have, by their names in the model."""
        if not isinstance(module, Few) or id(module) not in self._one_by_one:
            names = self._names
            own = ((names.get((id(module), name)), tensor) for name, tensor in _saved(module))
            return ((name, tensor) for name, tensor in own if name is not None)
        for _, flat in _saved(module):
            flat.zero_()  # also what lies between the layers' tensors
        return module.shown(self._one_by_one[id(module)])

    def _match(self, model: nn.Module, beside: Callable[[str], bool], kinds: dict[str, str]) -> None:
        """``beside``: whether a tensor of that name may be on one side alone; ``kinds``: shapes, and whether they are
        floating-point, of what the files have."""
        names: dict[int, list[str]] = {}  # of each tensor, be it tied or shared
        wanted: dict[int, str] = {}
        views: list[torch.Tensor] = []  # an id is another's once they are gone
        for prefix, module in model.named_modules(remove_duplicate=False):
            found = [(f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in _saved(module)]
            if isinstance(module, Few) and not any(name in kinds for name, _ in found):
                self._one_by_one[id(module)] = prefix
                found = list(module.shown(prefix))
                views += (tensor for _, tensor in found)
            for name, tensor in found:
                wanted[id(tensor)] = _described(tensor)
                names.setdefault(id(tensor), []).append(name)
        there = {key: [name for name in full if name in kinds] for key, full in names.items()}
        known = {name for full in names.values() for name in full}
        missing = [names[key] for key, full in there.items() if not full]
        more = sorted(name for name in kinds.keys() - known if not ignored(model, name))
        problems = {
            "missing from the files": [" = ".join(full) for full in missing if not any(map(beside, full))],
            "not in the model": [name for name in more if not beside(name)],
            "of another shape or kind": [
                f"{name} ({kinds[name]} for {wanted[key]})"
                for key, full in there.items()
                for name in full
                if kinds[name] != wanted[key]
            ],
        }
        if any(problems.values()):
            raise InputError(
                f"the weights do not fit this {type(model).__name__}: {_counted(problems)}"
                f"{in_other_groups(model, kinds)}; make the model from the configuration that the weights were saved "
                "with"
            )
        if missing or more:
            sides = {"initialised, missing from the files": [" = ".join(full) for full in missing], "left out": more}
            warnings.warn(f"weights of this {type(model).__name__}: {_counted(sides)}", stacklevel=2)
        self._names = {
            (id(m), name): there[id(tensor)][0]
            for m in model.modules()
            if id(m) not in self._one_by_one
            for name, tensor in _saved(m)
            if there[id(tensor)]
        }


def files_of(source: Source) -> list[Path]:
    """The safetensors files that ``source`` names: those of a folder by its index, if it has one.

    Raises InputError where there are none.
    """
    if not isinstance(source, str | os.PathLike):
        return [path for one in source for path in files_of(one)]
    path = Path(source)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(f"weights={str(path)!r} is not a .safetensors file; no other kind is read")
        return [path]
    if not path.is_dir():
        raise InputError(f"weights={str(path)!r} was asked for; there is no such file or folder")
    whole = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1 and path / "model.safetensors" not in whole:
        return _shards(indices[0])
    if not whole or len(indices) > 1:
        raise InputError(
            f"weights={str(path)!r} is a folder with {len(whole)} .safetensors files and {len(indices)} indices; "
            "save with save_pretrained(), or name the files"
        )
    return [path / "model.safetensors"] if indices else whole


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{index} is not an index of safetensors files ({error!r}); save the weights again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise InputError(f"{index} names {name!r}, which is not a file beside it; copy the missing file there")
    return [index.parent / name for name in names]


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(path)
    except StorageError as error:
        raise StorageError(f"{error}; copy or save it again") from error


def _described(tensor: torch.Tensor) -> str:
    return f"{'floating-point' if tensor.is_floating_point() else 'other'} {list(tensor.shape)}"


def _saved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own tensors that its ``state_dict()`` has."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield name, tensor


def _beside(model: nn.Module, blocks: Sequence[nn.Module]) -> Callable[[str], bool]:
    """Whether a name lies beside the lists of blocks, in a model for which transformers makes what is missing."""
    inside = {id(block) for block in blocks}
    lists = {name.rpartition(".")[0] or name for name, module in model.named_modules() if id(module) in inside}
    prefixes = tuple(f"{name}." for name in lists)
    return lambda name: is_converted(model) and not name.startswith(prefixes)


def _counted(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{len(names)} {what}: {_listed(names)}" for what, names in found.items() if names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
