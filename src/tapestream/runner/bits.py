"""Whether two tensors hold the same bits."""

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.device.type == "meta":
        return True
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout and same_bits(one.to_dense(), other.to_dense())
    return bool(torch.equal(one, other)) or bool(((one == other) | ((one != one) & (other != other))).all())
