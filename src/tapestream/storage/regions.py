"""`Region`: a run of bytes in one tier, the unit that pools hand out and copy engines move."""

from dataclasses import dataclass, field

import torch

from tapestream.ir import Tier
from tapestream.storage.disk import Extent


@dataclass(slots=True, eq=False, weakref_slot=True)
class Region:
    """``nbytes`` bytes in ``tier``, compared by identity; made and taken back by a `Pool`.

    ``tensor`` is one-dimensional, uint8, exactly ``nbytes`` long and starts at a multiple of 4096 (None on DISK;
    on a CUDA device at what the caching allocator gives, a multiple of 512). ``extent`` is the file behind a DISK
    region, None elsewhere. ``generation`` grows by one at each release: who remembers the number of the time
    at which the bytes were theirs can tell that they no longer are.
    """

    tier: Tier
    nbytes: int
    tensor: torch.Tensor | None = field(default=None, repr=False)
    extent: Extent | None = field(default=None, repr=False)
    generation: int = 0

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
