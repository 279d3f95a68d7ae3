"""Tensors that an update writes or reads while the user's program goes on: what would look at them waits first."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_SHOWING_NUMBERS = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))  # properties that do
_HARMLESS = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex",
     "is_contiguous", "storage_offset", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
     "__hash__", "__len__", "get_device")
)  # fmt: skip


class _Updating:
    """``_wait``: returns when the update has ended, and the tensor is what it was."""

    _wait: Callable[[], None] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever reads or writes numbers comes after the update."""
        if not _is_harmless(func):
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, _Updating):
                    _end(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class UpdatingParameter(_Updating, torch.nn.Parameter):
    """A parameter meanwhile."""


class UpdatingGradient(_Updating, torch.Tensor):
    """A gradient meanwhile."""


_MEANWHILE: dict[type, type] = {torch.nn.Parameter: UpdatingParameter, torch.Tensor: UpdatingGradient}
_OTHERWISE = {meanwhile: usual for usual, meanwhile in _MEANWHILE.items()}


def can_wait(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these are tensors of PyTorch's own classes, so that who looks at them can be made to wait."""
    return all(type(tensor) in _MEANWHILE for tensor in tensors)


def begin(tensors: Iterable[torch.Tensor], wait: Callable[[], None]) -> None:
    """From now on, who looks at them calls ``wait`` first."""
    for tensor in tensors:
        if type(tensor) in _MEANWHILE:
            tensor._wait = wait  # type: ignore[attr-defined]
            tensor.__class__ = _MEANWHILE[type(tensor)]


def end(tensors: Iterable[torch.Tensor]) -> None:
    """They are what they were."""
    for tensor in tensors:
        if type(tensor) in _OTHERWISE:
            tensor.__class__ = _OTHERWISE[type(tensor)]
            vars(tensor).pop("_wait", None)


def _end(tensor: Any) -> None:
    wait = vars(tensor).get("_wait")
    if wait is not None:
        wait()
    end([tensor])  # a copy of one knows of no update


def _is_harmless(func: Any) -> bool:
    """Whether it looks at no numbers: most properties, and what is known by name. ``p.grad = other`` is no write."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "data") not in _SHOWING_NUMBERS
    return name in _HARMLESS
