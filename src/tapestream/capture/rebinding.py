"""Tensors that are set to the memory that they have already: `torch.nn.utils.parametrize` does so with a parameter that
it puts under another name, whose version that would move as if it had been written into."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_set: Any = torch.ops.aten.set_.source_Tensor
_set_version: Any = torch._C._autograd._unsafe_set_version_counter


def left_out(func: Any, args: Any) -> bool:
    """Whether a call is a ``set_`` of a tensor to what it is. Its version will then not have moved."""
    if func is not _set:
        return False
    tensor, source = args
    if not _are_one(tensor, source):
        return False
    if tensor._version:  # autograd adds one when the call has returned; below zero there are none
        _set_version((tensor,), (tensor._version - 1,))
    return True


def _are_one(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return tensor is source or (
        tensor.layout is source.layout is torch.strided
        and tensor.untyped_storage()._cdata == source.untyped_storage()._cdata
        and tensor.storage_offset() == source.storage_offset()
        and (tensor.shape, tensor.stride(), tensor.dtype) == (source.shape, source.stride(), source.dtype)
    )


class LeavesCompiled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode under which compiled code stays compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """It need not be: to skip it takes seconds to import."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True


class Rebinding(LeavesCompiled):
    """Inside, such calls are left out. Every run of a stage that was found to make some is in one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if left_out(func, args) else func(*args, **(kwargs or {}))
