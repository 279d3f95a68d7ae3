"""What ``loss`` of `accumulate` may give."""

from typing import Any

import torch

from tapestream.errors import InputError


def checked(loss: Any) -> torch.Tensor:
    """``loss`` of one micro-batch. Raises InputError for all but a number that can be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"accumulate: loss(output, micro_batch) gave a {type(loss).__name__}; return the loss itself, a scalar "
            "tensor (of a model of transformers, output.loss)"
        )
    if loss.numel() != 1:
        raise InputError(
            f"accumulate: loss(output, micro_batch) gave a tensor of shape {tuple(loss.shape)}; return a scalar, such "
            "as its mean()"
        )
    if not loss.requires_grad:
        raise InputError(
            "accumulate: loss(output, micro_batch) gave a number without a gradient; make it of the model's output, "
            "without detach() and no_grad()"
        )
    return loss
