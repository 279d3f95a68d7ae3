"""Low-rank adapters (LoRA, Hu et al. 2021), to plan with: what is trained in the place of a model's weights."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Adapted(nn.Linear):
    """A linear layer with an adapter; its own weights are frozen."""

    down: nn.Parameter
    up: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) to (.., out)."""
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(model: nn.Module, blocks: Iterable[nn.Module], rank: int) -> nn.Module:
    """Freeze ``model`` and give every linear layer in ``blocks`` an adapter of ``rank``, in place."""
    model.requires_grad_(requires_grad=False)
    for block in blocks:
        for layer in list(block.modules()):
            if type(layer) is nn.Linear:
                layer.__class__ = Adapted
                weight = layer.weight
                layer.down = nn.Parameter(
                    torch.empty(rank, layer.in_features, dtype=weight.dtype, device=weight.device)
                )
                layer.up = nn.Parameter(torch.empty(layer.out_features, rank, dtype=weight.dtype, device=weight.device))
    return model
