"""Parameter groups as users give them, and what an optimizer makes of its options, checked before anything is made."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.optim.state import OptimizerClass


def as_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """torch's list of dicts, or parameters, as a list of dicts. Raises InputError for anything else."""
    listed = list(groups)
    if not listed:
        raise InputError("the optimizer got no parameters; is every parameter of the model frozen?")
    if all(isinstance(p, torch.Tensor) for p in listed):
        listed = [{"params": listed}]
    return [_group(number, group) for number, group in enumerate(listed)]


def template(cls: OptimizerClass, listed: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer on tensors of one element, with the parameters' dimensions: checks the options and fills in
    the defaults without any state of size. Raises InputError for an optimizer whose step needs a closure, and for what
    it does not take."""
    if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer):
        raise InputError(
            f"{cls!r} was given as the optimizer's class; give the class, such as torch.optim.AdamW, and its options "
            "by name: ts.optimizer(model, torch.optim.AdamW, lr=1e-3)"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{cls.__name__}.step() needs a closure, which it calls again and again with all parameters changed at "
            "once; the blocks of a streamed model are updated one after the other: use an optimizer that treats "
            "tensors independently, such as AdamW, SGD or Adagrad"
        )
    stand_ins = [
        {
            **group,
            "params": [nn.Parameter(torch.zeros((1,) * p.dim(), dtype=p.dtype, device="cpu")) for p in group["params"]],
        }
        for group in listed
    ]
    try:
        return cls(stand_ins, **options)
    except Exception as error:  # whatever a class of others may raise
        raise InputError(f"{cls.__name__} does not take these options: {error}") from error


def _group(number: int, group: Any) -> dict[str, Any]:
    if not isinstance(group, Mapping) or "params" not in group:
        raise InputError(
            f"groups[{number}] is a {type(group).__name__}{' without params' if isinstance(group, Mapping) else ''}; "
            "groups= takes torch's list of dicts: groups=[{'params': [p, ...], 'lr': ...}, ...]"
        )
    given = group["params"]
    parameters = [given] if isinstance(given, torch.Tensor) else list(given)
    strange = next((p for p in parameters if not isinstance(p, torch.Tensor)), None)
    if strange is not None or isinstance(given, set | frozenset):
        found = "a set, which has no order" if strange is None else f"a {type(strange).__name__} among its params"
        raise InputError(f"groups[{number}] has {found}; give a list of parameters: {{'params': [p, ...]}}")
    return {**group, "params": parameters}


def check_choices(update: str, master: str | None) -> None:
    """Raise InputError for a moment of updates, or a choice of masters, that is not known."""
    if update not in ("step", "backward"):
        raise InputError(f"update={update!r} was asked for; it is 'step' or 'backward'")
    if master not in ("auto", None):
        raise InputError(f"master={master!r} was asked for; it is 'auto' (fp32 masters for 16-bit parameters) or None")


def check_alone(mine: Collection[int], others: Collection[int] | None) -> None:
    """Raise InputError where one that was made for other parameters is still to be used: two at a time, each with a
    part of the model, as plain PyTorch has them, would be taken for one that replaces the other."""
    if others is not None and set(others).isdisjoint(mine):
        raise InputError(
            f"an optimizer for {len(mine)} parameters of a streamed model was asked for, but the model has one for "
            f"{len(others)} others that was never stepped; there is one at a time, and a new one replaces it: make one "
            "with groups=[{'params': [...], 'lr': ...}, {'params': [...], ...}], or, for different classes, use "
            "torch's own for the smaller part (its state stays in memory)"
        )
