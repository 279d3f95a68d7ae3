"""`Region`: a run of bytes in one tier, the unit that pools hand out and copy engines move."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tapestream.ir import Tier
from tapestream.storage.disk import Extent


class Use(Protocol):
    """A copy from or to a HOST region that the device makes while the host goes on."""

    number: int
    """Grows with each copy."""

    def happened(self) -> bool:
        """Whether it is over."""

    def settle(self) -> None:
        """Block until it is over."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Region:
    """``nbytes`` bytes in ``tier``, compared by identity; made and taken back by a `Pool`.

    ``tensor`` is one-dimensional, uint8, exactly ``nbytes`` long and starts at a multiple of 4096 (None on DISK;
    on a CUDA device at what the caching allocator gives, a multiple of 512). ``extent`` is the file behind a DISK
    region, None elsewhere. ``generation`` grows by one at each release: who remembers the number of the time
    at which the bytes were theirs can tell that they no longer are. ``uses``: by stream, the last copy from or to a
    HOST region; who reads or writes the bytes on the host waits for these first (`settle_uses`), and they stay with
    the bytes when the region is released.
    """

    tier: Tier
    nbytes: int
    tensor: torch.Tensor | None = field(default=None, repr=False)
    extent: Extent | None = field(default=None, repr=False)
    generation: int = 0
    uses: dict[object, Use] = field(default_factory=dict, repr=False)

    @property
    def memory(self) -> torch.Tensor:
        """The ``nbytes`` bytes as a uint8 tensor. Raises TypeError for a DISK region, which has none."""
        if self.tensor is None:
            raise TypeError(f"{self} has no memory: its bytes lie in a file")
        return self.tensor

    @property
    def file(self) -> Extent:
        """The file of a DISK region. Raises TypeError for a region in memory, which has none."""
        if self.extent is None:
            raise TypeError(f"{self} has no file: its bytes lie in memory")
        return self.extent


def settle_uses(uses: Mapping[object, Use]) -> None:
    """Block until these copies have happened."""
    for use in uses.values():
        use.settle()
