"""What the store asks of those who train the same model in other processes."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class Sharing(Protocol):
    """The ranks of a group. In a backward each announces the blocks of which it has gradients, one after the other;
    all of them sum the same block at a time."""

    def announce(self, block: int | None, fresh: Sequence[torch.Tensor | None]) -> int | None:
        """Say which block comes next here (None: the backward has ended), and this rank's gradients of its parameters
        (None: of that one it has none). Returns the block that all ranks sum now, None where the backward of all has
        ended."""

    def fail(self) -> None:
        """The backward has failed here: the next one begins anew."""

    def sum(
        self,
        parameters: Sequence[torch.Tensor],
        fresh: Mapping[int, torch.Tensor],
        earlier: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """By number of a parameter of the block that was announced last: what earlier backwards have left, to which
        every rank's gradient is added, in the order of ranks, in new tensors. ``fresh``: this rank's."""
