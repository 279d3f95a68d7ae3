"""Parameter blocks: what runs read, what backwards add up, what updates change."""

from tapestream.costs import Profile, UniformStages
from tapestream.ir import Kind, Tier, Value
from tapestream.simulate.clock import Clock
from tapestream.simulate.explain import broken
from tapestream.simulate.places import DEVICE, Places, number_of
from tapestream.simulate.shards import add_gradient

_TIERS = tuple(Tier)


class Blocks:
    """The rules about blocks. ``summed``: blocks whose gradient holds something that no update has used yet;
    ``updated``: those of which every part was updated, ``begun``: parts updated of those of which some were."""

    __slots__ = ("begun", "clock", "last_stage_of", "places", "profile", "summed", "updated")

    def __init__(self, profile: Profile, places: Places, clock: Clock) -> None:
        self.profile = profile
        self.places = places
        self.clock = clock
        self.last_stage_of = _first_uses(profile)  # backwards run downwards
        self.summed: set[int] = set()
        self.updated: set[int] = set()
        self.begun: dict[int, int] = {}

    def need(self, block: int) -> None:
        """A run reads parameters and buffers (those that have bytes) on the device."""
        current, cost = self.places.current, self.profile.blocks[block]
        for kind, nbytes in ((Kind.PARAMETERS, cost.parameters_nbytes), (Kind.BUFFERS, cost.buffers_nbytes)):
            if nbytes and not current[kind].get(block, 0) & 1:
                broken(f"{self.places.whereabouts(kind, block)}, it must be current on DEVICE")

    def add_gradient(self, block: int) -> None:
        """A backward makes the gradient of its block, or adds to it."""
        if not self.profile.blocks[block].gradient_nbytes:
            return
        places = self.places
        found = places.current[Kind.GRADIENT].get(block, 0)
        if places.shards > 1 and not found & 1 and add_gradient(places, block):
            return
        if found & 1:
            places.write(Kind.GRADIENT, block, DEVICE)
        elif found:
            broken(
                f"{places.whereabouts(Kind.GRADIENT, block)} but not on DEVICE, so it would be overwritten instead of "
                "added to; Prefetch it first"
            )
        elif block in self.summed:
            broken(f"GRADIENT {block} was freed with the sum of earlier backwards in it; Offload it, or do not free it")
        else:
            places.make(Kind.GRADIENT, block)
            self.summed.add(block)

    def update(self, block: int, part: int, next_backward: int) -> None:
        """Update: wherever parameters, gradient and that part of the block's optimizer state are current together."""
        places = self.places
        places.check(Value(Kind.PARAMETERS, block))
        places.check(Value(Kind.OPTIMIZER_STATE, block, part))
        cost = self.profile.blocks[block]
        if block in self.updated:
            broken(f"block {block} was updated already; each block is updated at most once a step")
        if part != self.begun.get(block, 0):
            broken(f"the parts of block {block} are updated in order, once each; {self.begun.get(block, 0)} is next")
        if next_backward >= self.last_stage_of.get(block, len(self.profile)):
            broken(f"Backward({self.last_stage_of[block]}) still uses block {block}; update it afterwards")
        needed = [(Kind.PARAMETERS, block), (Kind.GRADIENT, block)]
        if cost.parts[part]:
            needed.append((Kind.OPTIMIZER_STATE, number_of(block, part)))
        tiers = _TIERS if places.shards == 1 else _TIERS[Tier.SHARD :]  # whole gradients are one rank's alone
        tier = next((t for t in tiers if all(places.current[k].get(n, 0) >> t & 1 for k, n in needed)), None)
        if tier is None:
            broken(
                f"parameters, gradient and optimizer state of block {block} must be current in one tier"
                f"{'; ' if places.shards == 1 else ' that holds shards; '}"
                + "; ".join(places.whereabouts(kind, number) for kind, number in needed)
            )
        places.memory.touch(tier.memory, cost.update_extra_nbytes)
        for kind, number in needed:
            if kind is not Kind.GRADIENT:
                places.write(kind, number, tier)
        self.clock.compute(cost.part_seconds(part), "Update", block)
        self.begun[block] = part + 1
        if part + 1 == len(cost.parts):
            del self.begun[block]
            self.updated.add(block)
            self.summed.discard(block)


def _first_uses(profile: Profile) -> dict[int, int]:
    """For each block the stage that uses it first, whose backward is the last to do so."""
    if not profile.blocks:
        return {}
    if isinstance(profile.stages, UniformStages):
        return {} if profile.stages.cost.block is None else {profile.stages.cost.block: 0}
    return {c.block: k for k, c in reversed(list(enumerate(profile.stages))) if c.block is not None}
