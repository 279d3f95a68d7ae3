"""Stages whose sizes depend on the data: experts, each of which takes as many tokens as the router sends it.

A plan is to hold for every batch, and the profiled one may be an even one. The worst is a batch whose tokens are all
alike: whoever decides token by token sends them all the same way. So such a stage is run on that too, and costs what
the larger of both takes. A few tokens remain as they were, so that every expert that had some still has, and makes its
gradients. A router that adds noise, or looks at other tokens, may send some elsewhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tapestream.costs import StageCost
from tapestream.runner.state import State

# Nodes of operations that take or put rows by number or by mask: numbers that the stage may have computed.
_PICKS = frozenset(
    {
        "IndexAddBackward0", "IndexBackward0", "IndexCopyBackward0", "IndexPutBackward0", "IndexSelectBackward0",
        "MaskedScatterBackward0", "MaskedSelectBackward0",
    }
)  # fmt: skip
_REMAINING = 128  # one token of so many, the last ones: what comes before them does not see them in causal models


@dataclass(frozen=True, slots=True)
class Skewed:
    """Bytes of a run on tokens that are all alike. ``backward_peak_nbytes``: with the gradients that it makes;
    ``backward_extra_nbytes``: beyond all of these."""

    saved_nbytes: int
    forward_extra_nbytes: int
    record_extra_nbytes: int
    backward_extra_nbytes: int
    backward_peak_nbytes: int

    def bound(self, cost: StageCost) -> StageCost:
        """``cost``, measured on the batch at hand, as an upper bound for all batches.

        Where all bytes are the same, no size depends on the data. Expert by expert, a backward frees saved tensors and
        makes gradients. The busiest comes last here, when the others' saved tensors are gone; in another batch it comes
        first: they are added, or the gradients are, whichever is less.
        """
        mine = (cost.saved_nbytes, cost.forward_extra_nbytes, cost.recorded_extra_nbytes, cost.backward_extra_nbytes)
        here = (self.saved_nbytes, self.forward_extra_nbytes, self.record_extra_nbytes, self.backward_extra_nbytes)
        if mine == here:
            return cost
        few = (self.saved_nbytes + max(self.forward_extra_nbytes, self.record_extra_nbytes)) * 2 // _REMAINING
        backward = min(self.backward_peak_nbytes, self.backward_extra_nbytes + self.saved_nbytes) + few
        return replace(
            cost,
            saved_nbytes=max(cost.saved_nbytes, self.saved_nbytes),
            forward_extra_nbytes=max(cost.forward_extra_nbytes, self.forward_extra_nbytes + few),
            record_extra_nbytes=max(cost.recorded_extra_nbytes, self.record_extra_nbytes + few),
            backward_extra_nbytes=max(cost.backward_extra_nbytes, backward),
        )


def may_be_uneven(nodes: Sequence[str]) -> bool:
    """Whether sizes inside a stage may depend on the data, by the names of its graph's nodes. Says so of tables that
    are read by fixed numbers, too."""
    return not _PICKS.isdisjoint(nodes)


def skewed(state: State, out: State) -> State:
    """``state`` with tokens that are all alike, but for a few: of tensors shaped like an output, every row is the
    first."""
    shapes = {(t.shape, t.dtype) for t in out.tensors if t.is_floating_point() and t.dim() > 1 and t.numel()}
    return replace(state, tensors=tuple(_alike(t) if (t.shape, t.dtype) in shapes else t for t in state.tensors))


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    rows, found = tensor.shape[-2], torch.empty_like(tensor)
    found.copy_(tensor[(0,) * (tensor.dim() - 1)].expand_as(tensor))
    remaining = rows // _REMAINING
    if remaining:
        found[..., -remaining:, :] = tensor[..., -remaining:, :]
    return found


def nbytes_of(shapes: Sequence[tuple[torch.Size, tuple[int, ...], torch.dtype]]) -> int:
    """Bytes of all tensors of these shapes together."""
    return sum(math.prod(shape) * dtype.itemsize for shape, _, dtype in shapes)
