"""`Projection`: the operands of a head whose logits were not made, and how they or their loss are made of them."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tapestream.errors import GradientError
from tapestream.frontends.loss import (
    ChunkLoss,
    Chunks,
    autocast_dtype,
    by_chunks,
    cast_dtype,
    lowered,
    without_autocast,
)

Within: TypeAlias = Callable[..., Tensor]
"""Takes a function and its tensors, and calls it where the weight of the head is at hand."""


class Projection:
    """One call of the head: its operands, and what autocast made of them. ``used``: a loss was made of it by chunks.

    ``within``: what runs the functions that read the weight, where this comes and goes.
    """

    __slots__ = ("_versions", "_within", "bias", "cast", "chunks", "hidden", "used", "weight")

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: Chunks, within: Within | None = None
    ) -> None:
        self.hidden, self.weight, self.bias, self.chunks = hidden, weight, bias, chunks
        self._within = within
        self.cast = autocast_dtype(hidden.device.type)
        self.used = False
        self._versions = self._found()

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        return cast_dtype(self.hidden.dtype, self.cast)

    def check(self) -> None:
        """Raise GradientError when an operand is not what it was."""
        if self._versions != self._found():
            raise GradientError(
                "logits of a model streamed with loss_chunks were read after the head's weight, bias or input had "
                "changed (by optimizer.step(), say), so they can no longer be computed; read them before, or pass "
                "loss_chunks=None"
            )

    def logits(self) -> Tensor:
        """All of them, as the head would have made them."""
        self.check()
        return self._run(functools.partial(_logits, self.weight, self.bias, self.cast), self.hidden)

    def loss(self, loss: ChunkLoss, rows: Tensor, labels: Tensor) -> Tensor:
        """``loss`` of the logits of ``rows``, by chunks."""
        self.check()
        self.used = True
        # Nothing of this object: what runs it may be held by the call of the model, which this object holds.
        head, chunks = (self.weight, self.bias), self.chunks
        return self._run(lambda rows, labels: by_chunks(loss, rows, head, labels, chunks), rows, labels)

    def _run(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(*tensors) if self._within is None else self._within(function, *tensors)

    def _found(self) -> object:
        operands = (self.hidden, self.weight, self.bias)
        moves = self._within is not None
        return [None if t is None else (t._version, moves or t.data_ptr()) for t in operands]


def _logits(weight: Tensor, bias: Tensor | None, cast: torch.dtype | None, hidden: Tensor) -> Tensor:
    kind = hidden.device.type
    if autocast_dtype(kind) == cast:
        return F.linear(hidden, weight, bias)
    operands = (lowered(t, cast) for t in (hidden, weight, bias))
    with without_autocast(kind):
        return F.linear(*operands)  # type: ignore[arg-type]
