"""`Samples`: some numbers of each tensor that a compiled module saves, to know them again when it runs again.

Number, shapes and dtypes of saved tensors do not tell one graph of `torch.compile` from another that saves them in
another order: made under another stance, say, or anew for shapes that change.
"""

from typing import TypeAlias

import torch

from tapestream.errors import GradientError

Sample: TypeAlias = tuple[tuple[int, ...], torch.Tensor]

_MOST = 1024  # numbers of each tensor


class Samples:
    """Of one call of a compiled module; ``name`` is that of its class."""

    __slots__ = ("_found", "_next", "name")

    def __init__(self, name: str) -> None:
        self.name, self._next = name, 0
        self._found: list[Sample | None] = []

    def begin(self, *, first: bool) -> None:
        """The module begins to run, for the ``first`` time or again."""
        if first:
            self._found.clear()
        self._next = 0

    def see(self, tensor: torch.Tensor, *, first: bool) -> None:
        """It saves ``tensor``. Raises GradientError where that is not what it saved the first time."""
        sample = _sample(tensor)
        if first:
            self._found.append(sample)
            return
        at, self._next = self._next, self._next + 1
        if at >= len(self._found) or _differ(self._found[at], sample):
            raise GradientError(
                f"Program: {self.name}, compiled, saved other tensors in a replay than in its first run: torch.compile "
                "ran another graph of it (under another stance, or compiled anew); run backward under the stance of "
                "the forward, compile before the program's first call, or call it uncompiled"
            )


def _differ(known: Sample | None, sample: Sample | None) -> bool:
    if known is None or sample is None:
        return known is not sample
    return known[0] != sample[0] or not torch.equal(known[1], sample[1])


def _sample(tensor: torch.Tensor) -> Sample | None:
    """Strides, and the bits of numbers spread over the tensor; None where it has none to look at."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    left, steps = _MOST, list[slice]()
    for size in reversed(tensor.shape):
        taken = min(size, max(1, left))
        steps.append(slice(None, None, -(-size // taken)))
        left //= taken
    with torch.no_grad():
        some = tensor.detach()[tuple(reversed(steps))].resolve_conj().resolve_neg()
        return tensor.stride(), some.reshape(-1).clone().view(torch.uint8)
