"""`BlockOrder`: where in the plan of its call each block stands."""

from collections.abc import Sequence
from typing import Protocol

from tapestream.frontends.module.calls.again import UnplannedBlock
from tapestream.runner.stage import Traits


class PlannedChain(Protocol):
    """``positions`` and ``traits`` of its blocks, by stage."""

    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def traits(self) -> Sequence[Traits]: ...


class PlannedCall(Protocol):
    """A `Prepared`: its chains, and (chain, stage) of every block in the order of their calls."""

    @property
    def segments(self) -> Sequence[PlannedChain]: ...
    @property
    def order(self) -> Sequence[tuple[int, int]]: ...
    @property
    def writes_outside(self) -> bool: ...


class BlockOrder:
    """Of one call. ``done``: how many blocks it has called, or left out, so far."""

    def __init__(self, prepared: PlannedCall) -> None:
        self._prepared, self.done = prepared, 0

    def place_of(self, position: int) -> tuple[int, int]:
        """(segment, stage) of the block that is called next. Blocks in between are left out of this call: their stages
        hand the state on.

        Raises UnplannedBlock when the plan has it nowhere after the last one.
        """
        for number in range(self.done, len(self._prepared.order)):
            segment, k = self._prepared.order[number]
            if self._prepared.segments[segment].positions[k] == position:
                self.done = number + 1
                return segment, k
        raise self.unplanned(position, "was called where the profiled call of this model did not call it")

    def has_place(self, position: int) -> bool:
        """Whether the plan has a call of this block still to come."""
        rest = self._prepared.order[self.done :]
        return any(self._prepared.segments[segment].positions[k] == position for segment, k in rest)

    def unplanned(self, position: int, why: str) -> UnplannedBlock:
        """What is raised where a block is called otherwise than in the plan."""
        run = self._prepared.order[: self.done]
        blocks_wrote = any(self._prepared.segments[segment].traits[k].buffers for segment, k in run)
        return UnplannedBlock(position, blocks_wrote or self._prepared.writes_outside, why)
