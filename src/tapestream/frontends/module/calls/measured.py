"""What a call without gradients takes, measured once for calls of a kind."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from tapestream.runner.ambient import Autocast
from tapestream.storage.meter import MemoryMeter, MemoryWatch

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


@dataclass(frozen=True, slots=True)
class Measured:
    """What one call took: ``working_nbytes`` beside its arguments and all parameters, and its blocks in ``order``."""

    sizes: tuple[int, ...]
    working_nbytes: int
    order: tuple[int, ...]

    def growth(self, sizes: tuple[int, ...]) -> float:
        """The largest ratio by which ``sizes`` exceed those measured; at least 1."""
        pairs = [(new, old) for new, old in zip(sizes, self.sizes, strict=True) if new > old]
        return max((new / old if old else float("inf") for new, old in pairs), default=1.0)

    def estimate(self, sizes: tuple[int, ...]) -> int:
        """Bytes for a call of these ``sizes``."""
        return int(self.working_nbytes * self.growth(sizes) ** 2)


@dataclass(slots=True)
class Gauge:
    """Measures what a call makes, section by section: bringing blocks is left out."""

    watch: MemoryWatch
    order: list[int] = field(default_factory=list)
    level_nbytes: int = 0
    top_nbytes: int = 0

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Count what is made inside."""
        meter = MemoryMeter()
        try:
            with self.watch.measured() as meter:
                yield
        finally:
            self.top_nbytes = max(self.top_nbytes, self.level_nbytes + meter.peak_nbytes)
            self.level_nbytes += meter.end_nbytes


def look_at_call(
    handle: "Streamed", args: tuple[Any, ...], kwargs: dict[str, Any], given: int
) -> tuple[object, tuple[int, ...]]:
    """The kind of a call, and the sizes on which its bytes depend: dimensions, counts, bytes in caches."""
    kinds: list[object] = [
        id(handle.called), handle.model.training, Autocast.capture(handle.device), tuple(sorted(kwargs))
    ]  # fmt: skip
    sizes = [given]
    for leaf in pytree.tree_leaves((args, dict(sorted(kwargs.items())))):
        if isinstance(leaf, torch.Tensor):
            kinds.append((leaf.dtype, leaf.dim()))
            sizes += leaf.shape
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            kinds.append((int, leaf > 0))  # zero often stands for all
            sizes.append(abs(leaf))
        else:
            kinds.append(leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf))
    return tuple(kinds), tuple(sizes)
