"""Parameter blocks that several segments use: one segment's plan owns such a block, the others borrow it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tapestream.costs import BlockCost, StageCost
from tapestream.errors import InputError
from tapestream.frontends.module.observing.observed import Segment
from tapestream.frontends.module.plans.terms import Positioned

Place: TypeAlias = tuple[int, int]
"""Segment and stage."""


@dataclass(frozen=True, slots=True)
class Shared:
    """One block that several segments use, at ``places`` in the order of the forward.

    The first segment's backward is the last to touch the block. So its plan owns it: it moves it, sends its gradient
    home, updates it. To the others' plans it is a transient of the stage, brought for the run and given back after it;
    what their backwards have added up waits on the device.
    """

    places: tuple[Place, ...]

    @property
    def owner(self) -> int:
        """The segment whose plan has the block."""
        return self.places[0][0]

    def waiting_nbytes(self, after: Place, block: BlockCost) -> int:
        """Bytes of the block's gradient that lie on the device, as the later uses have added them up, when the
        backward of the stage ``after`` is about to begin."""
        return block.gradient_nbytes if self.places[0] <= after < self.places[-1] else 0

    def costs(self, stage: StageCost, place: Place, block: BlockCost, *, adds_once: bool) -> StageCost:
        """What ``stage`` at ``place`` costs beside its own: the block where it is borrowed, and the gradient that waits
        from the last use's backward to the first one's.

        That rides with the cotangents, which exist at the same times. A backward holds the cotangents on both its
        sides, but what waits only once, so its transient bytes may be negative.
        ``adds_once``: the sum is made in place, beside nothing but its two operands.
        """
        segment, k = place
        used, borrowed = place in self.places, place in self.places and segment != self.owner
        read = block.parameters_nbytes + block.buffers_nbytes if borrowed else 0
        into = self.waiting_nbytes(place, block)
        onward = self.waiting_nbytes((segment, k - 1), block) if k else 0
        held = into + (into if used and not adds_once else 0) + (block.gradient_nbytes if borrowed else 0)
        backward = held - into - onward + (read if stage.reads_parameters else 0)
        return replace(
            stage,
            forward_extra_nbytes=stage.forward_extra_nbytes + read,
            record_extra_nbytes=stage.recorded_extra_nbytes + read,
            backward_extra_nbytes=stage.backward_extra_nbytes + backward,
            cotangent_nbytes=stage.cotangent_bytes + into,
        )


def find_shared(segments: Sequence[Positioned], uses: Sequence[int | None]) -> dict[int, Shared]:
    """Blocks used in more than one segment. ``uses``: the block at each position."""
    places: dict[int, list[Place]] = {}
    for number, segment in enumerate(segments):
        for k, position in enumerate(segment.positions):
            block = uses[position]
            if block is not None:
                places.setdefault(block, []).append((number, k))
    return {block: Shared(tuple(at)) for block, at in places.items() if at[0][0] != at[-1][0]}


def shared_blocks(segments: Sequence[Segment], uses: Sequence[int | None]) -> dict[int, Shared]:
    """As `find_shared`.

    Raises InputError where autocast makes one cast for all of its uses, whose gradients plain PyTorch adds up in the
    lower precision.
    """
    found = find_shared(segments, uses)
    for shared in found.values():
        casting = Counter(leaf for number, k in shared.places for leaf in segments[number].traits[k].casts)
        number, k = shared.places[-1]
        if max(casting.values(), default=0) > 1:
            raise InputError(
                f"block {segments[number].positions[k]}, or one that shares its parameters, is called in more than one "
                "chain under autocast, which casts its weights once for all calls and sums their gradients in the "
                "lower precision. Between chains this is not supported; move the code that changes the state between "
                "these calls into a block, or use no autocast"
            )
    return found


def owned(segment: int, uses: Sequence[int | None], shared: Mapping[int, Shared]) -> list[int | None]:
    """The blocks of ``uses`` without those that the plan of ``segment`` does not own."""
    return [None if b is not None and b in shared and shared[b].owner != segment else b for b in uses]
