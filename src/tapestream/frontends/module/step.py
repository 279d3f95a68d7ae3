"""`Step`: the profiles of one training step's segments, measured on a model or outlined before there is one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapestream.costs import BlockCost, Carried, Profile, StageCost
from tapestream.frontends.module.shared import Shared, owned
from tapestream.frontends.module.terms import Positioned, Terms
from tapestream.frontends.module.wide import adds_once


@dataclass(frozen=True, slots=True)
class Step:
    """``uses``: the parameter block of each of ``terms.modules``; ``costs``: of the blocks; ``shared``: those that
    several segments use. ``outside_nbytes``: what is on the device throughout. ``turn_nbytes``, ``turn_seconds``: what
    runs after the last module's forward and before its backward."""

    terms: Terms
    segments: Sequence[Positioned]
    uses: Sequence[int | None]
    costs: Sequence[BlockCost]
    shared: Mapping[int, Shared]
    outside_nbytes: int
    turn_nbytes: int
    turn_seconds: float

    def profile(
        self, number: int, stages: Sequence[StageCost], initial_nbytes: int, carried: tuple[Carried, ...]
    ) -> Profile:
        """That of segment ``number``, whose costs are ``stages``. Blocks of other segments cost nothing in it."""
        positions, last = self.segments[number].positions, self.segments[-1]
        own = owned(number, [self.uses[position] for position in positions], self.shared)
        after = self.segments[number] is last
        turns = after or not self.terms.is_wide(last)
        return Profile(
            tuple(self._stage(number, k, cost, own[k]) for k, cost in enumerate(stages)),
            initial_nbytes,
            tuple(cost if block in own else BlockCost(0) for block, cost in enumerate(self.costs)),
            carried,
            outside_nbytes=self.outside_nbytes,
            turn_nbytes=self.turn_nbytes if turns else 0,
            turn_seconds=self.turn_seconds if after else 0.0,
        )

    def _stage(self, number: int, k: int, cost: StageCost, block: int | None) -> StageCost:
        extra = cost.backward_extra_nbytes
        if block is not None and self.terms.update != "backward":
            # Gradients come as tensors of their own and are laid out in one run of bytes when backward has ended.
            extra = max(extra, self.costs[block].gradient_nbytes)
        cost = replace(cost, block=block, backward_extra_nbytes=extra)
        once = adds_once(self.terms.modules[self.segments[number].positions[k]])
        for index, shared in self.shared.items():
            cost = shared.costs(cost, (number, k), self.costs[index], adds_once=once)
        return cost
