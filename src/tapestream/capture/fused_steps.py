"""Steps of fused optimizers, which write into parameters without moving their version counters."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEPS: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id


def fused_steps(tensor: torch.Tensor) -> int:
    """How many steps of fused optimizers have written into ``tensor``."""
    if not _STEPS:
        return 0
    reference, count = _STEPS.get(id(tensor), (None, 0))
    return count if reference is not None and reference() is tensor else 0


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.grad is not None:
                _STEPS[id(parameter)] = weakref.ref(parameter, _forget(id(parameter))), fused_steps(parameter) + 1


def _forget(key: int) -> Any:
    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        if key in _STEPS and _STEPS[key][0] is reference:
            del _STEPS[key]

    return forget


register_optimizer_step_post_hook(_stepped)
