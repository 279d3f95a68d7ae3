"""What users have written, among the operations of a program: it may do anything, so it is neither tried nor called
more often than need be, and what it uses beside its arguments is watched (see `Hidden`)."""

from collections.abc import Iterable
from typing import Any

import torch

from tapestream.executor.program.seams import Apply
from tapestream.executor.program.whole import Whole

_CLASSES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCHS_OWN = frozenset(("aten", "prims", "prim", "quantized", "c10d", "_c10d_functional", "c10d_functional"))
_DISABLED = torch._C._disabled_torch_function_impl
_USUAL: Any = vars(torch.Tensor)["__torch_function__"].__func__
_BELOW = torch.Tensor.__torch_dispatch__


def is_custom(function: Any) -> bool:
    """Whether it is an operation that `torch.library` was given."""
    if not isinstance(function, _CLASSES):
        return False
    name: Any = function._schema.name if isinstance(function, torch._ops.OpOverload) else function._qualified_op_name
    return str(name).partition("::")[0] not in _TORCHS_OWN


def by_user(function: Any) -> bool:
    """Whether it is a custom operation, an autograd.Function, or a module that is taken as one operation."""
    return isinstance(function, (Apply, Whole)) or is_custom(function)


def taking_over(tensors: Iterable[torch.Tensor]) -> str | None:
    """The name of the first class among those of ``tensors`` that does something of its own with torch's calls."""
    return next((type(tensor).__name__ for tensor in tensors if _takes_over(type(tensor))), None)


def _takes_over(kind: type) -> bool:
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    handler: Any = kind.__torch_function__  # type: ignore[attr-defined]
    below: Any = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return (handler is not _DISABLED and getattr(handler, "__func__", None) is not _USUAL) or below is not _BELOW
