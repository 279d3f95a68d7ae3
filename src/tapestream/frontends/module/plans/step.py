"""`Step`: the profiles of one training step's segments, measured on a model or outlined before there is one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.costs import BlockCost, Carried, Profile, StageCost
from tapestream.frontends.module.homes.wide import adds_once
from tapestream.frontends.module.plans.shared import Shared, owned
from tapestream.frontends.module.plans.terms import Positioned, Terms
from tapestream.ir.actions import Kind, Tier
from tapestream.ir.homes import home_tiers

_NO_BYTES = BlockCost(0)


@dataclass(frozen=True, slots=True)
class Step:
    """``uses``: the parameter block of each of ``terms.modules``; ``costs``: of the blocks; ``shared``: those that
    several segments use. ``outside_nbytes``: what is on the device throughout. ``turn_nbytes``, ``turn_seconds``: what
    runs after the last module's forward and before its backward. ``shards``: ranks among which blocks are divided.
    ``exchanged``: bytes that summing each block's gradients over ranks takes, none where they are not."""

    terms: Terms
    segments: Sequence[Positioned]
    uses: Sequence[int | None]
    costs: Sequence[BlockCost]
    shared: Mapping[int, Shared]
    outside_nbytes: int
    turn_nbytes: int
    turn_seconds: float
    shards: int = 1
    exchanged: Sequence[int] = ()

    def profile(
        self, number: int, stages: Sequence[StageCost], initial_nbytes: int, carried: tuple[Carried, ...]
    ) -> Profile:
        """That of segment ``number``, whose costs are ``stages``. Blocks of other segments cost nothing in it."""
        positions, last = self.segments[number].positions, self.segments[-1]
        own = owned(number, [self.uses[position] for position in positions], self.shared)
        last_use = {block: k for k, block in enumerate(own)}
        after = self.segments[number] is last
        turns = after or not self.terms.is_wide(last)
        return Profile(
            tuple(self._stage(number, k, cost, own[k], last_use[own[k]] == k) for k, cost in enumerate(stages)),
            initial_nbytes,
            tuple(cost if block in last_use else _NO_BYTES for block, cost in enumerate(self.costs)),
            carried,
            outside_nbytes=self.outside_nbytes,
            turn_nbytes=self.turn_nbytes if turns else 0,
            turn_seconds=self.turn_seconds if after else 0.0,
            shards=self.shards,
        )

    def _stage(self, number: int, k: int, cost: StageCost, block: int | None, last_use: bool) -> StageCost:
        module, extra = self.terms.modules[self.segments[number].positions[k]], cost.backward_extra_nbytes
        gradient = 0 if block is None else self.costs[block].gradient_nbytes
        if gradient and not last_use:
            # What this use makes goes into tensors of its own, one after the other, beside what later uses have left.
            extra += gradient + max(tensor_nbytes(p) for p in module.parameters() if p.requires_grad)
        leaves = home_tiers(self.terms.home)[Kind.GRADIENT] is not Tier.DEVICE
        if gradient and (self.shards > 1 or (leaves and self.terms.update != "backward")):
            # It comes as tensors of their own, laid out in one run of bytes when the backward has ended.
            extra = max(extra, gradient - cost.saved_nbytes)
        if gradient and self.exchanged and block is not None:
            extra = max(extra, self.exchanged[block] - cost.saved_nbytes)
        cost = replace(cost, block=block, backward_extra_nbytes=extra)
        once = adds_once(module)
        for index, shared in self.shared.items():
            cost = shared.costs(cost, (number, k), self.costs[index], adds_once=once)
        return cost
