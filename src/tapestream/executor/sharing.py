"""What the store asks of those who train the same model in other processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tapestream.storage.blocks import Share


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

    def givers(self, number: int) -> list[int]:
        """The ranks that have a gradient of parameter ``number`` of the block that was announced last."""

    @property
    def scale(self) -> float:
        """What each rank's gradient is multiplied with before it is added."""


class Arrival(Protocol):
    """What comes from other ranks."""

    def wait(self) -> None:
        """Until it is there. Raises StorageError where a rank does not come."""


@dataclass(frozen=True, slots=True)
class Addends:
    """Numbers of one ``dtype`` at bytes ``first`` to ``last`` of a shard: those of ``ranks`` are added in this order,
    to what is there if it has ``begun``."""

    first: int
    last: int
    dtype: torch.dtype
    ranks: Sequence[int]
    begun: bool


class Shards(Protocol):
    """The ranks among which parameter blocks are divided: all do what follows, in the same order."""

    share: Share

    def meet(self, what: str, document: object) -> None:
        """Come to something that no plan knows. Raises InputError, on every rank, where others do something else."""

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Arrival:
        """Begin to bring the bytes of all ranks' shards into ``whole``."""

    def sum(self, whole: torch.Tensor, shard: torch.Tensor, addends: Sequence[Addends]) -> Arrival:
        """Begin to add up what ``whole`` has on every rank, of this rank's shard."""

    def complete(self, flat: torch.Tensor) -> None:
        """Let numbers of other ranks come to where this one has zeros; of each number one rank has it."""

    def largest(self, found: torch.Tensor) -> None:
        """Let ``found`` be the largest of all ranks'."""
