"""`Leftover`: gradients that a step has written into, and that are still there."""

import weakref
from collections.abc import Iterable

import torch


class Leftover:
    """``wanted``: whether anybody is to be told of them."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._written: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []

    def note(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step has written into the gradients of these."""
        if self._wanted:
            found = [(p, p.grad) for p in parameters if p.grad is not None]
            self._written = [(p, weakref.ref(gradient), gradient._version) for p, gradient in found]

    def is_there(self) -> bool:
        """Whether one of them is ``.grad`` yet, as it was then."""
        written = ((p.grad, gradient(), version) for p, gradient, version in self._written)
        return any(now is not None and now is then and now._version == version for now, then, version in written)
