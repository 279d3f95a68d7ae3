"""Steps of fused optimizers, which write into parameters without moving their version counters."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_UNSEEN = "_tapestream_unseen"


@dataclass(slots=True)
class _Steps:
    of: weakref.ref[torch.Tensor]
    count: int


_STEPS: dict[int, _Steps] = {}  # by id


def fused_steps(tensor: torch.Tensor) -> int:
    """How many steps of fused optimizers have written into ``tensor``."""
    known = _STEPS.get(id(tensor)) if _STEPS else None
    return known.count if known is not None and known.of() is tensor else 0


def unseen(optimizer: Optimizer) -> Optimizer:
    """``optimizer``, whose steps are not counted: it is given tensors that stand for others, new ones each time."""
    setattr(optimizer, _UNSEEN, True)
    return optimizer


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, _UNSEEN):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter.grad is not None:
                known = _STEPS.get(id(parameter))
                if known is not None and known.of() is parameter:
                    known.count += 1
                else:
                    _STEPS[id(parameter)] = _Steps(weakref.ref(parameter, _forget(id(parameter))), 1)


def _forget(key: int) -> Any:
    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        if key in _STEPS and _STEPS[key].of is reference:
            del _STEPS[key]

    return forget


register_optimizer_step_post_hook(_stepped)
