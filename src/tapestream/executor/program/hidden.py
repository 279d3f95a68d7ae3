"""What an opaque operation (an autograd.Function) uses beside its arguments: a replay must find it as it was."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.executor.program.patterns import tensors_of
from tapestream.executor.program.values import address_of


class Hidden:
    """The tensors that torch calls inside one opaque operation were given and that outlive it, with their versions.

    Held weakly: what the operation makes for itself goes with it, what it keeps on its context never changes; what is
    left is held by somebody else, a buffer of a captured module for example.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._left: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def see(self, args: Any, kwargs: Any) -> None:
        """A torch call inside is given these."""
        for tensor in tensors_of((args, kwargs), []):
            known = self._seen.get(id(tensor))
            if known is None or known() is not tensor:
                self._seen[id(tensor)] = weakref.ref(tensor)

    def end(self, shown: Iterable[torch.Tensor]) -> None:
        """The operation has ended; ``shown``: its arguments and results, which others watch."""
        addresses = {address_of(tensor) for tensor in shown}
        alive = [tensor for ref in self._seen.values() if (tensor := ref()) is not None]
        self._left = [(weakref.ref(t), t._version) for t in alive if address_of(t) not in addresses]
        self._seen.clear()

    def check(self, name: str) -> None:
        """Raise GradientError where one has changed: before the operation runs again, and after it."""
        for ref, version in self._left:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                raise GradientError(
                    f"Program: {name} uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments and "
                    "that it or others have written into, so running it again would count twice or use the new values; "
                    "hand the tensor in as an argument and write into it outside, or allow a budget that keeps all"
                )
