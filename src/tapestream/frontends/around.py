"""What may not be around a call that runs a part of the user's code again later."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd import forward_ad

from tapestream.errors import InputError
from tapestream.executor.program.calls.seams import listener_now
from tapestream.runner.guards import PLACING, refuse_hooks

P = ParamSpec("P")
R = TypeVar("R")
_DYNAMO = "torch._dynamo"


def uncompiled(method: Callable[P, R]) -> Callable[P, R]:
    """``method``, which torch.compile leaves as it is, and all that it calls: code around it may be compiled (not with
    ``fullgraph=True``, which names it). As `torch.compiler.disable`, which takes seconds to import."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _DYNAMO not in sys.modules:
            return method(*args, **kwargs)
        before = set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            set_eval_frame(before)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def check_around(what: str) -> None:
    """Raise InputError inside a `Program` and inside hooks on saved tensors."""
    check_no_program(f"ts.{what}", "use the plain function, which the program's budget covers too")
    check_no_hooks(what)


def _check_no_transforms(what: str) -> None:
    """Raise InputError inside torch.func's transforms and where tangents are computed, which do not see through a call
    that runs again later."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise InputError(
            f"{what} is called inside a transform of torch.func (vmap, jvp, grad) or forward-mode differentiation, "
            "which cannot look into it; use the plain function there, or call the transform inside a stage, step or "
            "block"
        )


def check_no_hooks(what: str) -> None:
    """Raise InputError inside hooks on saved tensors, but for those that only move them: these may be left out; and
    inside transforms, which work by hooks of another kind."""
    refuse_hooks(what, PLACING)
    _check_no_transforms(what)


def check_no_program(what: str, instead: str) -> None:
    """Raise InputError inside a `Program`, for which such a call would be one that it can neither see nor repeat."""
    if listener_now() is not None:
        raise InputError(
            f"a {what} is called inside a ts.Program, which cannot run it again; call it outside and pass its result "
            f"in, or {instead}"
        )
