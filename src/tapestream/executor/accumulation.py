"""What autograd does with the gradient of a leaf: hooks, adding it to ``.grad``, and hooks again."""

import sys
from collections.abc import Callable, Mapping

import torch


def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let ``.grad`` be the gradient, or the sum of both."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)
    after_accumulation(parameter)


def _references_of_one() -> int:
    """What Python counts for an object that one variable has."""
    alone = object()
    references = sys.getrefcount(alone)
    return references


_ALONE = _references_of_one()


def is_held(gradient: torch.Tensor, references: int) -> bool:
    """Whether others have a gradient too, of which the caller's variable is one of ``references``: autograd gives one
    tensor to all operands of a sum."""
    counted = getattr(gradient, "_use_count", None)  # by PyTorch's own code; not known in older versions
    return references > _ALONE or counted is None or counted() > 1


def through_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What autograd does with a leaf's hooks: each may replace the gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def after_accumulation(parameter: torch.Tensor) -> None:
    """Call what users have registered for when ``.grad`` is complete."""
    hooks: Mapping[int, Callable[[torch.Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        hook(parameter)
