"""The reference of updates in RAM: plain PyTorch's gradients, and torch's optimizer on copies on the CPU."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from tapestream.frontends.module.stream import handle_of


class OnCpu:
    """Steps parameters called ``inside`` on the CPU, by torch's fused kernel where ``fused`` says so, the others where
    they are. 16-bit parameters inside are rounded from fp32 copies."""

    def __init__(
        self, model: nn.Module, inside: Collection[str], make: type[torch.optim.Optimizer], fused: bool, **knobs: Any
    ) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        mine = {p: nn.Parameter(wide(p, "cpu")) for name, p in named.items() if name in inside}
        narrow = {p: nn.Parameter(wide(p, p.device)) for p in named.values() if p not in mine and p.itemsize < 4}
        outside = [narrow.get(p, p) for p in named.values() if p not in mine]
        self.copies = {**mine, **narrow}
        self.optimizers = [make(outside, **knobs)] if outside else []
        how = {"fused": True} if fused else {}
        # One for each tensor: torch's fused SGD fails where only some have a buffer.
        self.optimizers += [make([copy], **knobs, **how) for copy in mine.values()]

    def step(self) -> None:
        for p, copy in self.copies.items():
            copy.grad = None if p.grad is None else p.grad.detach().to(copy.device, copy.dtype)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            for p, copy in self.copies.items():
                p.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.copies:
            p.grad = None
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def take_back(self) -> None:
        """What somebody has written into the parameters."""
        with torch.no_grad():
            for p, copy in self.copies.items():
                copy.copy_(p)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}}


def wide(p: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A copy of 32 bits at least."""
    return p.detach().to(device, torch.float32 if p.itemsize < 4 else p.dtype, copy=True)


def names_inside(model: nn.Module) -> set[str]:
    """Names of a streamed model's parameters that are in blocks which come and go."""
    handle = handle_of(model)
    blocks = (block for block in handle.store.blocks if block.index not in handle.pinned.blocks)
    ids = {id(p) for block in blocks for p in block.parameters}
    return {name for name, p in model.named_parameters() if id(p) in ids}
