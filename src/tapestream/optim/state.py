"""What state an optimizer keeps for a tensor, found by asking the optimizer itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.errors import InputError

OptimizerClass = type[torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class StateShape:
    """Tensors that an optimizer keeps for one parameter, by name; scalars such as Adam's ``step`` are not streamed."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self.tensors)


def probe(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
) -> StateShape:
    """Step the optimizer once on a tensor without bytes, and look at the state that it has made.

    ``options``: the entries of its parameter group; ``required``: what its constructor was given.

    Raises InputError for an optimizer that cannot take a tensor by itself.
    """
    plain = {**options, "fused": False, "foreach": False}  # the fast forms refuse tensors without bytes
    options = {k: plain[k] for k in options}
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    try:
        optimizer = cls([{**options, "params": [parameter]}], **required)
        optimizer.step()
    except Exception as error:
        raise InputError(
            f"{cls.__name__} could not be tried on a single tensor ({type(error).__name__}: {error}); tapestream "
            f"streams optimizers that "
            "treat tensors independently, such as AdamW, SGD or Adagrad"
        ) from error
    state = optimizer.state.get(parameter, {})
    return StateShape(
        tuple(
            (name, tuple(value.shape), value.dtype)
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        )
    )
