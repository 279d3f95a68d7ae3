"""Frames that Dynamo is not to compile, told without importing it, which takes seconds.

Compiled code calls ours back: hooks of saved tensors, function and dispatch modes, what stands before a block's
``forward``. Dynamo would compile these too, each for many shapes, and operations that went through what it had made of
them would have other bits.
"""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_dynamo: Any = torch._C._dynamo.eval_frame
_set_strategy: Any = getattr(_dynamo, "set_code_exec_strategy", None)  # since PyTorch 2.7
_MODELS = "tapestream.models"  # networks, like the user's own


def leave_own_frames() -> None:
    """From now on Dynamo compiles no function of ours, but still what of the user's runs inside."""
    if _set_strategy is not None:
        for name in tuple(sys.modules):
            if name.startswith("tapestream.") and not name.startswith(_MODELS):
                _leave(name)


@functools.cache
def _leave(name: str) -> None:
    """Those of one module."""
    skip = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.DEFAULT)
    for code in _codes(sys.modules[name]):
        if code.co_name != "__call__":  # that of a streamed model looks whether it is compiled, and refuses
            _set_strategy(code, skip)


def _codes(module: types.ModuleType) -> Iterator[types.CodeType]:
    """Of all functions that were defined in a module, with those inside of them."""
    waiting: list[Any] = [one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        match one:
            case types.CodeType():
                yield one
                waiting += one.co_consts
            case type():
                waiting += vars(one).values()
            case property():
                waiting += (one.fget, one.fset)
            case classmethod() | staticmethod():
                waiting.append(one.__func__)
            case functools.partial():
                waiting.append(one.func)
            case types.FunctionType():
                waiting += (one.__code__, getattr(one, "__wrapped__", None))
            case _:
                pass
