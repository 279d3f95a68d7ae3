"""Whether what was saved fits what it is to be loaded into: all that can be told before anything is changed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from tapestream.errors import InputError, StorageError
from tapestream.frontends.saving.manifest import MANIFEST
from tapestream.frontends.saving.state import in_other_groups, is_stateful
from tapestream.frontends.saving.together import state_to_save
from tapestream.frontends.saving.tree import MALFORMED
from tapestream.optim.streamed import StreamedOptimizer

_EXTRA_STATE = "_extra_state"  # how PyTorch names what a module's get_extra_state() returns
_UNCHANGED = "nothing was changed"
_NUMBERS = (torch.Tensor, int, float)


def notes_of(part: Any) -> dict[str, Any]:
    """What the manifest notes of an object, to compare it by: its class, and an optimizer's parameters."""
    notes: dict[str, Any] = {"class": _class_of(part).__name__}
    if isinstance(part, torch.optim.Optimizer):
        parameters = [p for group in part.param_groups for p in group["params"]]
        notes["parameters"] = [[str(p.dtype), None if is_lazy(p) else list(p.shape)] for p in parameters]
    return notes


def check_given(name: str, part: Any, entry: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError unless ``part`` is an object of the kind that the manifest's ``entry`` tells of."""
    if isinstance(part, type):
        raise InputError(f"{name}={part.__name__} is a class, which has no state; give an object of it")
    if not is_stateful(part):
        raise InputError(
            f"{name}={type(part).__name__} has no load_state_dict(); leave it out, and take load()[{name!r}]"
        )
    if not entry["stateful"]:
        raise InputError(
            f"{folder} holds a plain value as {name}, not the state of an object, and {type(part).__name__} was to be "
            f"loaded; leave it out, and take load()[{name!r}]"
        )
    saved, mine = entry.get("class"), _class_of(part)  # the first version did not note it
    other = "parameters" in entry if isinstance(part, nn.Module) else saved not in _names_of(mine)
    if saved is not None and other:
        raise InputError(
            f"{folder} was saved from another {name}: its class is {saved} there and {mine.__name__} here; load it "
            f"into an object of class {saved}; {_UNCHANGED}"
        )


def check_fits(name: str, part: Any, entry: Mapping[str, Any], tree: Any, folder: Path) -> None:
    """Raise InputError unless the state ``tree`` fits ``part``, StorageError where it is no state of such an object."""
    named = isinstance(part, nn.Module | torch.optim.Optimizer | LRScheduler | torch.amp.GradScaler)
    if named and not isinstance(tree, Mapping):
        raise StorageError(
            f"{folder / MANIFEST}: the state of {name} is a {type(tree).__name__}, not that of a "
            f"{_class_of(part).__name__}; take another save"
        )
    if isinstance(part, nn.Module):
        _check_module(name, part, tree, folder)
    elif isinstance(part, torch.optim.Optimizer):
        try:
            _check_optimizer(name, part, entry, tree, folder)
        except MALFORMED as error:
            if isinstance(error, InputError):
                raise
            raise StorageError(
                f"{folder / MANIFEST}: the state of {name} is not that of an optimizer ({error!r}); take another save"
            ) from error
    elif isinstance(part, torch.amp.GradScaler) and part.is_enabled() and not tree:
        raise InputError(
            f"{folder} was saved with {name} disabled, here it is enabled; leave it out, to begin with its own scale; "
            f"{_UNCHANGED}"
        )


def _class_of(part: Any) -> type[Any]:
    return part.optimizer_class if isinstance(part, StreamedOptimizer) else type(part)


def _names_of(cls: type[Any]) -> list[str]:
    """Of classes whose state one of ``cls`` takes: those that it builds on, but of PyTorch's own the first alone, where
    AdamW for one builds on Adam."""
    names = []
    for base in cls.__mro__:
        names.append(base.__name__)
        if base.__module__.startswith("torch."):
            break
    return names


def _check_module(name: str, part: nn.Module, tree: Mapping[str, Any], folder: Path) -> None:
    mine = state_to_save(part)
    if mine.keys() != tree.keys():
        mine = part.state_dict()  # saved from one with a module per layer, perhaps
    here, there = _shapes(mine), _shapes(tree)
    names = here.keys() | there.keys()
    wrong = sorted((key for key in names if not _same(key, here, there)), key=str)
    if wrong:
        first = wrong[0]
        raise InputError(
            f"{folder} was saved from another {name}: {len(wrong)} of {len(names)} tensors differ, {first!r} for one "
            f"({_kind(first, there)} saved, {_kind(first, here)} here){in_other_groups(part, there)}; {_UNCHANGED}"
        )
    for key, value in mine.items():
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            continue
        if value.is_meta:
            raise InputError(
                f"{key!r} of {name} is on the meta device, and would stay without values; give it memory first: "
                f"{name}.to_empty(device='cpu')"
            )
        saved = tree[key]
        if isinstance(saved, torch.Tensor) and saved.dtype != value.dtype and not key.endswith(_EXTRA_STATE):
            raise InputError(
                f"{folder} was saved from another {name}: {key!r} is {saved.dtype} there and {value.dtype} here, and "
                f"nothing is rounded; load into a {name} of {saved.dtype}, then convert that; {_UNCHANGED}"
            )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    """By name; None for what is no tensor, or has no shape yet."""
    return {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) and not is_lazy(value) else None
        for name, value in state.items()
    }


def _kind(key: str, shapes: Mapping[str, Any]) -> str:
    return "absent" if key not in shapes else "no tensor" if shapes[key] is None else str(shapes[key])


def _same(key: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    if key not in here or key not in there:
        return False
    return here[key] == there[key] or here[key] is None or str(key).endswith(_EXTRA_STATE)


def _check_optimizer(
    name: str, part: torch.optim.Optimizer, entry: Mapping[str, Any], tree: Mapping[str, Any], folder: Path
) -> None:
    here = [len(group["params"]) for group in part.param_groups]
    there = [len(group["params"]) for group in tree["param_groups"]]
    if here != there:
        raise InputError(
            f"{folder} was saved from another {name}: parameters per group are {there} there and {here} here; "
            f"{_UNCHANGED}"
        )
    mine, saved = notes_of(part)["parameters"], entry.get("parameters")
    for number, one in enumerate(mine):
        if saved is not None and saved[number] != one and None not in (one[1], saved[number][1]):
            raise InputError(
                f"{folder} was saved from another {name}: parameter {number} is of {_told(saved[number])} there and of "
                f"{_told(one)} here; {_UNCHANGED}"
            )
    numbers = [number for group in tree["param_groups"] for number in group["params"]]
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    states = tree["state"]
    for number, parameter in zip(numbers, parameters, strict=True):
        found = states.get(number)
        if not found:
            continue
        if _class_of(part).__module__.startswith("torch.") and not isinstance(found.get("step", 0), _NUMBERS):
            raise TypeError(f"step of parameter {number} is {found['step']!r}")  # which PyTorch would find half-way
        for key, shape, dtype in _expected(part, parameter, found):
            given = found.get(key)
            if given is None or tuple(given.shape) != shape or given.dtype != dtype:
                what = "nothing" if given is None else _told([given.dtype, list(given.shape)])
                raise InputError(
                    f"{folder} was saved from another {name}: {key!r} of parameter {number} is {what} there and "
                    f"{_told([dtype, list(shape)])} here; make {name} as it was saved; {_UNCHANGED}"
                )


def _expected(
    part: torch.optim.Optimizer, parameter: torch.Tensor, found: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """What the state of a parameter has to be: where it has a place already, or where PyTorch would round it."""
    if isinstance(part, StreamedOptimizer):
        return list(part.state_tensors(parameter))
    rounds = type(part).load_state_dict is torch.optim.Optimizer.load_state_dict and parameter.is_floating_point()
    if not rounds or is_lazy(parameter):
        return []
    return [
        (key, tuple(parameter.shape), parameter.dtype)
        for key, value in found.items()
        if key != "step" and isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
    ]


def _told(tensor: Any) -> str:
    dtype, shape = tensor
    return f"{dtype} and shape {tuple(shape)}"
