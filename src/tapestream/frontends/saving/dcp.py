"""`to_dcp` and `from_dcp`: exchange with PyTorch's Distributed Checkpoint (DCP), which FSDP2 and torchtitan write."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from tapestream.errors import InputError
from tapestream.frontends.saving.dcp_files import METADATA, PlannerInTurn, StoredByDcp, write_checkpoint
from tapestream.frontends.saving.fits import check_fits
from tapestream.frontends.saving.folder import Saves
from tapestream.frontends.saving.state import only_copies
from tapestream.frontends.saving.together import (
    check_loaded_together,
    check_stepped,
    loading,
    ranks_that_share,
    saved_together,
    state_to_save,
)
from tapestream.optim.shown import StateInParts
from tapestream.optim.streamed import StreamedOptimizer

_MODEL, _OPTIMIZER, _STATE, _GROUPS, _PARAMS = "model", "optim", "state", "param_groups", "params"
_ADAMW = "decoupled_weight_decay"  # the one thing by which the groups of Adam and AdamW differ
_UNCHANGED = "nothing was changed"


def to_dcp(path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Path:
    """Write ``model``, and ``optimizer``, as a checkpoint of ``torch.distributed.checkpoint`` (DCP); return its folder.

    ``path``: a folder that is not there, or is empty. It holds what ``dcp.save({"model": m, "optim": o})`` writes for
    ``m, o = get_state_dict(model, optimizer)``, with whole tensors of the same names, shapes, dtypes and bits. Any
    number of processes can load it by the usual calls, FSDP2's too. This is for exchange alone: DCP pickles what is no
    tensor, and has no checksums. `save` keeps a run. The model may be a plain one or a streamed one.

    Tensors are written one after the other, in files of up to 64 MiB or one tensor; memory is needed for those of one
    file, and for one block. Files are written in a folder beside ``path``, which is renamed at the end, so there is
    never half a checkpoint. Where ranks divide a model's blocks (``Peers(shard=True)``), every rank must call, and the
    first one writes. Where each rank has a copy, let one of them call.

    Raises InputError for a folder that has something in it and for what cannot be written, GradientError between a
    backward and its step under ``update="backward"``, StorageError if the disk is full (before anything is written) or
    fails.
    """
    parts = _parts(model, optimizer)
    check_stepped(parts, "ts.to_dcp()")
    folder, ranks = Saves(path).path, ranks_that_share(parts)
    refused = _in_the_way(folder)
    if ranks is not None:
        refused = ranks.told("began ts.to_dcp()", refused)[0]
    if refused:
        raise InputError(refused)
    planner = PlannerInTurn()
    planner.set_up_planner(_to_write(model, optimizer), is_coordinator=True)
    if ranks is None:
        return write_checkpoint(folder, planner)
    write = partial(write_checkpoint, folder, planner)
    return saved_together(ranks, {"": planner.given}, Saves(folder.parent), write, "ts.to_dcp()")


def from_dcp(path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load into ``model``, and ``optimizer``, what `to_dcp` has written, or ``dcp.save({"model": m, "optim": o})`` for
    ``m, o = get_state_dict(model, optimizer)``, by any number of processes, with FSDP2 or without: bit for bit.

    ``model``: a plain one or a streamed one, of the same names, shapes and dtypes; its weights may lie at the top of
    the checkpoint, too (``dcp.save(get_model_state_dict(model))``, torchtitan). ``optimizer``: of the same kind,
    with the same parameters in each group. Without it, the model alone is loaded. Options of groups become those of the
    checkpoint. A parameter without state there has none afterwards. Memory is needed for the state of one parameter,
    and for what of one tensor lies in one file. Where ranks divide a model's blocks (``Peers(shard=True)``), every rank
    must call, and reads all. DCP unpickles: load only checkpoints that you trust.

    Everything is checked before anything is changed: names, shapes, dtypes, that all files are there and long enough.
    Raises InputError for a folder that is no such checkpoint and for one of something else, StorageError where files
    are missing, cut short or cannot be read.
    """
    parts = _parts(model, optimizer)
    folder, ranks = Saves(path).path, ranks_that_share(parts)
    named = [_MODEL] if optimizer is None else [_MODEL, _OPTIMIZER]
    check_loaded_together(ranks, folder / METADATA, named, "ts.from_dcp()")
    checkpoint = StoredByDcp(folder)
    tree = checkpoint.tree(*named)
    keys = {_fqn(model, key): key for key in state_to_save(model)}
    weights = tree[_MODEL] if _MODEL in tree else checkpoint.tree(*keys)  # torchtitan puts the model at the top
    state = _model_state(keys, weights, folder)
    check_fits("model", model, {}, state, folder)
    numbered = None if optimizer is None else _optimizer_state(model, optimizer, tree.get(_OPTIMIZER), folder)
    if optimizer is not None and numbered is not None:
        check_fits("optimizer", optimizer, {}, numbered, folder)
        _check_names(optimizer, numbered[_STATE], folder)
    checkpoint.check_files()
    with loading(ranks):
        model.load_state_dict(state if only_copies(model) else _in_memory(state))
    if optimizer is not None and numbered is not None:
        copies = isinstance(optimizer, StreamedOptimizer)  # others keep what they are given
        optimizer.load_state_dict(numbered if copies else _in_memory(numbered))


def _parts(model: Any, optimizer: Any) -> list[Any]:
    """Those that are there. Raises InputError for what cannot be exchanged."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model={type(model).__name__} was given; give the torch.nn.Module: model=model")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer={type(optimizer).__name__} was given; give the torch or ts.optimizer() one, or leave it out"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise InputError(
                f"{name!r} is a DTensor, which FSDP2 or tensor parallelism divides; use torch.distributed.checkpoint "
                "itself for this model, on all ranks"
            )
        if is_lazy(tensor) or tensor.is_meta:
            raise InputError(f"{name!r} has no values yet; give it memory first: model.to_empty(device='cpu'), a call")
    return [model] if optimizer is None else [model, optimizer]


# -- writing ----------------------------------------------------------------------------------------------------------


def _in_the_way(folder: Path) -> str | None:
    if not os.path.lexists(folder):
        return None
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        return None
    what = "a folder with something in it" if folder.is_dir() else "a file or a link"
    return f"a checkpoint was to be written to {folder}, which is {what}; name a new folder, or remove that one"


def _to_write(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What ``get_state_dict(model, optimizer)`` gives, with tensors that come when they are written."""
    tree: dict[str, Any] = {_MODEL: {_fqn(model, key): value for key, value in state_to_save(model).items()}}
    if optimizer is None:
        return tree
    names = [[found[0] for found in group] for group in _names(model, optimizer)]
    state = state_to_save(optimizer)
    others = state.keys() - {_STATE, _GROUPS} | {key for key in state[_STATE] if type(key) is not int}
    strange = sorted(map(str, others))
    if strange:
        raise InputError(
            f"this {type(optimizer).__name__} keeps {', '.join(strange)} beside the state of parameters, which DCP's "
            "layout has no place for; leave optimizer= out, or keep the run with ts.save()"
        )
    flat = [name for group in names for name in group]
    tree[_OPTIMIZER] = {
        _STATE: {flat[number]: entries for number, entries in state[_STATE].items()},
        _GROUPS: [{**group, _PARAMS: own} for group, own in zip(state[_GROUPS], names, strict=True)],
    }
    return tree


def _fqn(model: nn.Module, key: str) -> str:
    """The name of what a state dict calls ``key``, without what wrappers (DDP, torch.compile) put before it."""
    return str(next(iter(_get_fqns(model, key))))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[list[str]]]:
    """Of each parameter in each group, its names in the model: several where it is tied, PyTorch's first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(_fqn(model, name))
    for number, group in enumerate(optimizer.param_groups):
        if any(id(p) not in names for p in group[_PARAMS]):
            raise InputError(
                f"group {number} of the optimizer has a parameter that is not the model's, and DCP keeps state by the "
                f"model's names; give the model that holds all its parameters, not this {type(model).__name__}"
            )
    return [[names[id(p)] for p in group[_PARAMS]] for group in optimizer.param_groups]


# -- reading ----------------------------------------------------------------------------------------------------------


def _in_memory(tree: Any) -> Any:
    """Where a model's or an optimizer's own code may keep what it is given, this is all that it is given."""
    if isinstance(tree, StateInParts):
        return tree.read().clone()
    if isinstance(tree, dict):
        return {key: _in_memory(value) for key, value in tree.items()}
    return tree


def _model_state(keys: Mapping[str, str], found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The state of a model, by its own names: ``keys``, by those that a checkpoint has."""
    lacking, more = sorted(keys.keys() - found.keys()), sorted(found.keys() - keys.keys())
    if not found:
        raise InputError(
            f"{folder} has nothing under {_MODEL!r}, and no name of this model at the top; write it with "
            f"dcp.save({{{_MODEL!r}: ..., {_OPTIMIZER!r}: ...}}); {_UNCHANGED}"
        )
    if lacking or more:
        which = [*(f"{name!r} is not there" for name in lacking[:1]), *(f"{name!r} is not here" for name in more[:1])]
        raise InputError(
            f"{folder} was written from another model: {len(lacking) + len(more)} names of {len(keys)} here and "
            f"{len(found)} there differ: {', '.join(which)}; make the model as it was written; {_UNCHANGED}"
        )
    return {key: found[name] for name, key in keys.items()}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, found: Any, folder: Path) -> dict[str, Any]:
    """The state of ``optimizer``, by numbers of its parameters."""
    if not isinstance(found, Mapping) or _GROUPS not in found:
        flat = "in one flat table (flatten_optimizer_state_dict=True)" if found else "no optimizer"
        raise InputError(
            f"{folder} has {flat}, and an optimizer was to be loaded; write it with get_state_dict(model, optimizer) "
            f"under {_OPTIMIZER!r}, or leave optimizer= out; {_UNCHANGED}"
        )
    own, states = _names(model, optimizer), found.get(_STATE, {})
    known = {name for group in own for names in group for name in names} | states.keys()
    there = [known.intersection(group[_PARAMS]) for group in found[_GROUPS]]  # without what was frozen, say
    among = set().union(*there)
    mine = [[next((n for n in names if n in among), names[0]) for names in group] for group in own]
    if sorted(map(sorted, mine)) != sorted(map(sorted, there)):
        raise InputError(
            f"{folder} was written from another optimizer: parameters per group are {list(map(len, there))} there and "
            f"{list(map(len, mine))} here, or have other names; make the same groups; {_UNCHANGED}"
        )
    numbers = {name: number for number, name in enumerate(name for group in mine for name in group)}
    groups = []
    for group, names in zip(optimizer.param_groups, mine, strict=True):
        given = {k: v for k, v in found[_GROUPS][there.index(set(names))].items() if k != "param_names"}
        lacking = sorted(optimizer.defaults.keys() - given.keys())
        if lacking or group.get(_ADAMW) != given.get(_ADAMW):
            what = f"{', '.join(lacking)} is not in its groups" if lacking else f"{_ADAMW} is {given.get(_ADAMW)} there"
            raise InputError(
                f"{folder} was written from an optimizer of another kind: {what}, which have "
                f"{', '.join(sorted(given.keys() - {_PARAMS}))}; make an optimizer of the class that was written; "
                f"{_UNCHANGED}"
            )
        groups.append({**group, **given, _PARAMS: [numbers[name] for name in names]})
    return {_STATE: {number: states[name] for name, number in numbers.items() if name in states}, _GROUPS: groups}


def _check_names(optimizer: torch.optim.Optimizer, states: Mapping[int, Any], folder: Path) -> None:
    """Raise InputError for state that a streamed optimizer has no place for."""
    if not isinstance(optimizer, StreamedOptimizer):
        return
    parameters = [p for group in optimizer.param_groups for p in group[_PARAMS]]
    for number, entries in states.items():
        places = {name for name, _, _ in optimizer.state_tensors(parameters[number])}
        more = sorted(k for k, v in entries.items() if isinstance(v, torch.Tensor) and v.dim() and k not in places)
        if more:
            raise InputError(
                f"{folder} was written from another optimizer: parameter {number} has {', '.join(more)} there, and "
                f"{', '.join(sorted(places)) or 'nothing'} here; make the optimizer with the class and options that "
                f"were written; {_UNCHANGED}"
            )
