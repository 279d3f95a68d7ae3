"""What may not be around a call that runs a part of the user's code again later."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd import forward_ad

from tapestream.errors import InputError
from tapestream.runner.guards import PLACING, refuse_hooks
from tapestream.runner.nesting import covered

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
    """Raise InputError inside hooks on saved tensors and inside transforms."""
    refuse_hooks(what, PLACING)
    _check_no_transforms(what)


def check_uncovered(what: str, instead: str) -> None:
    """Raise InputError inside another front end, which cannot run what is asked for as a part of its own."""
    if covered():
        raise InputError(
            f"{what} is called inside a ts.Program, a stage, a step or a streamed block, which cannot run it again; "
            f"call it outside and pass its result in, or {instead}"
        )


def _check_no_transforms(what: str) -> None:
    """Raise InputError inside torch.func's transforms and where tangents are computed, which do not see through a call
    that runs again later."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise InputError(
            f"{what} is called inside a transform of torch.func (vmap, jvp, grad) or forward-mode differentiation, "
            "which cannot look into it; use the plain function there, or call the transform inside a stage, step or "
            "block"
        )
