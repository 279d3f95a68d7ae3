"""What users have written, among the operations of a program: it may do anything, so it is neither tried nor called
more often than need be, and what it uses beside its arguments is watched (see `Hidden`)."""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from tapestream.executor.program.calls.seams import Apply, Transform
from tapestream.executor.program.calls.whole import Whole

_COMPILED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
_CLASSES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_TORCHS_OWN = frozenset(("aten", "prims", "prim", "quantized", "c10d", "_c10d_functional", "c10d_functional"))


def is_custom(function: Any) -> bool:
    """Whether it is an operation that `torch.library` was given."""
    if not isinstance(function, _CLASSES):
        return False
    name: Any = function._schema.name if isinstance(function, torch._ops.OpOverload) else function._qualified_op_name
    return str(name).partition("::")[0] not in _TORCHS_OWN


def kernel_of(operation: Any, args: Any, kwargs: Any) -> Callable[..., Any]:
    """What a custom operation calls, past the function modes that are entered."""
    if isinstance(operation, torch._ops.OpOverloadPacket):
        name = torch._C._jit_resolve_packet(operation._qualified_op_name, *args, **kwargs)
        operation = getattr(operation, name)
    return functools.partial(torch._C._dispatch_call_boxed, operation._handle)


def is_torchs_own(function: Any) -> bool:
    """Whether it is a function of PyTorch's that is not written in Python."""
    return isinstance(function, _COMPILED) or (isinstance(function, _CLASSES) and not is_custom(function))


def by_user(function: Any) -> bool:
    """Whether it is a custom operation, an autograd.Function, a transform of torch.func, or a module that is taken as
    one operation."""
    return isinstance(function, (Apply, Transform, Whole)) or is_custom(function)
