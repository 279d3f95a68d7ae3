"""What may pass from stage to stage: plain tensors, of which a detached one is the same."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tapestream.capture.python_state import GENERATORS
from tapestream.errors import InputError
from tapestream.runner.state import State

_DISABLED = torch._C._disabled_torch_function_impl
_USUAL: Any = vars(torch.Tensor)["__torch_function__"].__func__
_BELOW = torch.Tensor.__torch_dispatch__
_OURS = ("tapestream", "torch._subclasses")
"""Where classes of tensors are from that stand for plain ones."""


def check_passable(name: str, state: State, live: Sequence[torch.Tensor] = ()) -> None:
    """Raise InputError where ``state``, or the tensors ``live`` that it was made of, hold what a recompute would get
    without its class, its attributes or its own state."""
    drawn = next((type(one).__name__ for one in state.others if isinstance(one, GENERATORS)), None)
    if drawn is not None:
        raise InputError(
            f"{name}: the state holds a random generator ({drawn}), which later stages draw from; draw from the global "
            "generators, or from one that a stage's module has as an attribute"
        )
    tensors = [t for t in (*state.tensors, *live) if not type(t).__module__.startswith(_OURS)]
    odd = taking_over(tensors) or next((str(t.layout) for t in tensors if t.layout is not torch.strided), None)
    if odd is not None:
        raise InputError(
            f"{name}: the state holds a tensor of class or layout {odd}, which a recompute cannot restore; pass its "
            "parts (values, indices, mask) as plain tensors and put them together inside the stage"
        )
    named = next((n for t in live if type(t) is torch.Tensor for n in vars(t) if not n.startswith("_")), None)
    if named is not None:
        raise InputError(
            f"{name} returns a tensor with an attribute of its own ({named!r}), which the next stage would not find: "
            "pass it through the state, as a tuple or dictionary"
        )


def check_modules(name: str, modules: Sequence[nn.Module]) -> None:
    """Raise InputError for modules that cannot be run again like any other: those of torch.jit, and lazy ones that were
    never called."""
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name} holds {type(module).__name__}, made by torch.jit.script or trace, whose graph, and with it "
                "the bits, changes from call to call; use the module that it was made from"
            )
        if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise InputError(
                f"{name} holds a lazy module ({type(module).__name__}) that was never called; call it once before, so "
                "that it has parameters"
            )


def taking_over(tensors: Iterable[torch.Tensor]) -> str | None:
    """The name of the first class among those of ``tensors`` that does something of its own with torch's calls."""
    return next((type(tensor).__name__ for tensor in tensors if _takes_over(type(tensor))), None)


def _takes_over(kind: type) -> bool:
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return False
    handler: Any = kind.__torch_function__  # type: ignore[attr-defined]
    below: Any = kind.__torch_dispatch__  # type: ignore[attr-defined]
    return (handler is not _DISABLED and getattr(handler, "__func__", None) is not _USUAL) or below is not _BELOW
