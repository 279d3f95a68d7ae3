"""What an opaque operation (an autograd.Function), or a function that a torch call is given, uses beside the call's
tensors: a replay must find it as it was."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.executor.program.calls.foreign import Foreign, shown_of
from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.values import address_of, written
from tapestream.executor.program.calls.writes import statistics

_WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor


class Hidden:
    """The tensors that torch calls inside one opaque operation were given and that outlive it, with their versions.

    ``shown``: what the objects showed that it is given (see `foreign.shown`), before it ran. ``saved``: how many
    tensors its context has saved, -1 where it has none.

    Held weakly: what the operation makes for itself goes with it, what it keeps on its context never changes; what is
    left is held by somebody else, a buffer of a captured module for example.
    """

    def __init__(self, shown: Any = ()) -> None:
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._left: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._statistics: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self.shown, self.saved = shown, -1

    def see(self, function: Any, args: Any, kwargs: Any) -> None:
        """A torch call inside is given these."""
        self._statistics += [(weakref.ref(t), t.detach().clone()) for t in statistics(function, args, kwargs)]
        for tensor in tensors_of((args, kwargs), []):
            if _WRAPPED(tensor):  # by a transform inside of it
                continue
            known = self._seen.get(id(tensor))
            if known is None or known() is not tensor:
                self._seen[id(tensor)] = weakref.ref(tensor)

    def end(self, shown: Iterable[torch.Tensor]) -> bool:
        """The operation has ended; ``shown``: its arguments and results, which others watch. Says whether it has
        written into running statistics of others, which no version tells."""
        addresses = {address_of(tensor) for tensor in shown}
        alive = [tensor for ref in self._seen.values() if (tensor := ref()) is not None]
        self._left = [(weakref.ref(t), t._version) for t in alive if address_of(t) not in addresses]
        self._seen.clear()
        before, self._statistics = self._statistics, []
        return any((now := ref()) is not None and not torch.equal(now, then) for ref, then in before)

    def uses(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of those."""
        return any(ref() is tensor for ref, _ in self._left)

    def check_tensors(self, name: str) -> None:
        """Raise GradientError where one has changed."""
        self.check_unwritten(name, written(self._left))

    def check_unwritten(self, name: str, tensor: torch.Tensor | None) -> None:
        """Raise GradientError for ``tensor``, which the operation ``name`` uses and which was written into."""
        if tensor is not None:
            raise GradientError(
                f"Program: {name} uses a tensor of shape {tuple(tensor.shape)} that is not among its arguments and was "
                "written into, so a replay would count twice or use the new values; pass the tensor as an argument and "
                "write into it outside, or allow a budget that keeps all"
            )

    def check(self, name: str, given: tuple[Foreign, ...]) -> None:
        """Raise GradientError where one, or an object ``given``, has changed: before the operation runs again, and
        after it."""
        self.check_tensors(name)
        if shown_of(given) != self.shown:
            raise GradientError(
                f"Program: {name} is given an object that was changed afterwards, so a replay would use its new "
                "content; pass numbers and tensors as separate arguments, or make a new object each time"
            )
