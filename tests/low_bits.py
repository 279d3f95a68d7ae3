"""An optimizer whose state has fewer bits than it shows, as those of torchao."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class Codes(torch.Tensor):
    """Whole numbers and their scale inside; looks like a tensor of 32 bits."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> "Codes":
        made: Codes = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made.codes, made.scale = torch.zeros_like(like, dtype=torch.int8), like.new_ones(())
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].scale.copy_(args[1].abs().max() / 100 + 1e-9)
            args[0].codes.copy_((args[1] / args[0].scale).round())
            return args[0]
        args, kwargs = tree_map_only(cls, lambda one: one.codes * one.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class KeepsCodes(torch.optim.Optimizer):
    """Follows a mean of gradients of low precision."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", Codes(p))
                    mean.copy_(0.9 * mean + 0.1 * p.grad)
                    p.sub_(1.0 * mean, alpha=group["lr"])
