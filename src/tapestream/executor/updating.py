"""Tensors that an update writes or reads while the user's program goes on: what would look at them waits first.

Meanwhile they are of a class of their own, whose functions wait, and show no bytes of the update: code that looks past
PyTorch's Python functions finds NaN, never weights that are old or half new. Autograd waits before it adds to a
``.grad``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_SHOWING_NUMBERS = frozenset(("data", "T", "H", "mT", "mH", "real", "imag"))  # properties that do
_HARMLESS = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
     "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__", "__len__", "get_device")
)  # fmt: skip


class _Updating:
    """``_wait``: returns when the update has ended, and the tensor is what it was."""

    _wait: Callable[[], None] | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever reads or writes numbers comes after the update."""
        if not _is_harmless(func):
            for tensor in _inside((args, kwargs)):
                wait = vars(tensor).get("_wait")
                if wait is not None:  # a copy of one knows of no update
                    wait()
                _be_usual(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class UpdatingParameter(_Updating, torch.nn.Parameter):
    """A parameter meanwhile."""


class UpdatingGradient(_Updating, torch.Tensor):
    """A gradient meanwhile."""


_MEANWHILE: dict[type, type] = {torch.nn.Parameter: UpdatingParameter, torch.Tensor: UpdatingGradient}
_USUALLY = {meanwhile: usual for usual, meanwhile in _MEANWHILE.items()}


def can_wait(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether these are tensors of PyTorch's own classes, so that who looks at them can be made to wait."""
    return all(type(tensor) in _MEANWHILE and tensor.is_floating_point() for tensor in tensors)


@dataclass(slots=True)
class Hidden:
    """Tensors whose bytes an update works on; ``wait``: ends it, and calls `show`."""

    tensors: list[torch.Tensor]
    wait: Callable[[], None]
    _bytes: list[torch.Tensor] = field(default_factory=list)
    _hooks: list[tuple[Any, Any]] = field(default_factory=list)

    def hide(self) -> None:
        """From now on, who looks at them waits first."""
        for tensor in self.tensors:
            self._bytes.append(tensor.data)
            tensor.data = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
            if tensor.requires_grad and tensor.is_leaf:
                node = get_gradient_edge(tensor).node
                self._hooks.append((node, node.register_prehook(lambda _: self.wait())))
            tensor._wait = self.wait  # type: ignore[attr-defined]
            tensor.__class__ = _MEANWHILE[type(tensor)]

    def show(self) -> None:
        """They are what they were."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, found in zip(self.tensors, self._bytes, strict=False):
                tensor.data = found
        for tensor in self.tensors:
            _be_usual(tensor)
        for _, hook in self._hooks:
            hook.remove()


def _be_usual(tensor: Any) -> None:
    usual = _USUALLY.get(type(tensor))
    if usual is not None:
        vars(tensor).pop("_wait", None)
        tensor.__class__ = usual


def _inside(value: Any) -> Iterator[Any]:
    """Those among arguments, in lists and dicts of any class."""
    if isinstance(value, _Updating):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _inside(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _inside(one)


def _is_harmless(func: Any) -> bool:
    """Whether it looks at no numbers: most properties, and what is known by name. ``p.grad = other`` is no write."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "data") not in _SHOWING_NUMBERS
    return name in _HARMLESS
