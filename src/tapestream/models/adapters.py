"""Low-rank adapters (LoRA, Hu et al. 2021), to plan with: what is trained in the place of a model's weights."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from tapestream.errors import InputError


class Adapted(nn.Linear):
    """A linear layer with an adapter; its own weights are frozen."""

    down: nn.Parameter
    up: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """(.., in) to (.., out)."""
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(model: nn.Module, blocks: Iterable[nn.Module], rank: int) -> nn.Module:
    """Freeze ``model`` and give every linear layer in ``blocks`` an adapter of ``rank``, in place. Raises InputError
    where there is none."""
    layers = [layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear]
    if not layers:
        raise InputError(
            f"LoRA adapters go to linear layers, and the blocks of this {type(model).__name__} have none of class "
            "nn.Linear; plan it without --lora"
        )
    model.requires_grad_(requires_grad=False)
    for layer in layers:
        layer.__class__ = Adapted
        layer.down = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        layer.up = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))
    return model
