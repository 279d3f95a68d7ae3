"""Parameter blocks: what runs read, what backwards add up, what updates change."""

from tapestream.costs import Profile, UniformStages
from tapestream.ir import Kind, Tier, Update, Value
from tapestream.simulate.clock import Clock
from tapestream.simulate.explain import broken
from tapestream.simulate.places import DEVICE, Flight, Places, number_of, value_of
from tapestream.simulate.shards import add_gradient


class Blocks:
    """The rules about blocks. ``summed``: blocks whose gradient holds something that no update has used yet;
    ``updated``: those of which every part was updated, ``begun``: parts updated of those of which some were; ``used``:
    those that a run has read; ``late``: those updated before, with the gradient of the step before; ``where``: those
    of which something was updated, by tier."""

    __slots__ = ("begun", "clock", "last_stage_of", "late", "places", "profile", "summed", "updated", "used", "where")

    def __init__(self, profile: Profile, places: Places, clock: Clock) -> None:
        self.profile = profile
        self.places = places
        self.clock = clock
        self.last_stage_of = _first_uses(profile)  # backwards run downwards
        self.summed: set[int] = set()
        self.updated: set[int] = set()
        self.used: set[int] = set()
        self.late: set[int] = set()
        self.begun: dict[int, int] = {}
        self.where: dict[Tier, set[int]] = {}

    def need(self, block: int) -> None:
        """A run reads parameters and buffers (those that have bytes) on the device."""
        current, cost = self.places.current, self.profile.blocks[block]
        self.used.add(block)
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

    def update(self, action: Update, next_backward: int) -> None:
        """Update: of parameters, gradient and that part of the block's optimizer state, where these are current."""
        block, part, places = action.block, action.part, self.places
        if action.tier not in (DEVICE, Tier.HOST):
            broken(f"an update runs on the device or in HOST, not in {action.tier.name}")
        places.check(Value(Kind.PARAMETERS, block))
        places.check(Value(Kind.OPTIMIZER_STATE, block, part))
        cost = self.profile.blocks[block]
        self._check_turn(block, part, next_backward)
        needed = [(Kind.PARAMETERS, block), (Kind.GRADIENT, block)]
        if cost.parts[part]:
            needed.append((Kind.OPTIMIZER_STATE, number_of(block, part)))
        tier = Tier.SHARD if action.tier is DEVICE and places.shards > 1 else action.tier  # the whole is one rank's
        if not all(places.current[kind].get(number, 0) >> tier & 1 for kind, number in needed):
            broken(
                f"parameters, gradient and optimizer state of block {block} must be current in {tier.name}; "
                + "; ".join(places.whereabouts(kind, number) for kind, number in needed)
            )
        if tier is Tier.HOST:
            self._begin_on_host(block, part, needed)
        else:
            places.memory.touch(tier.memory, cost.update_extra_nbytes)
            for kind, number in needed:
                if kind is not Kind.GRADIENT:
                    places.write(kind, number, tier)
            self.clock.compute(cost.part_seconds(part), "Update", block)
        self.where.setdefault(action.tier, set()).add(block)
        self.begun[block] = part + 1
        if part + 1 == len(cost.parts):
            del self.begun[block]
            self.updated.add(block)
            self.summed.discard(block)

    def _check_turn(self, block: int, part: int, next_backward: int) -> None:
        """All runs of the block must be done; or still to come, for the gradient that was there as the step began."""
        if block in self.updated:
            broken(f"block {block} was updated already; each block is updated at most once a step")
        if part != self.begun.get(block, 0):
            broken(f"the parts of block {block} are updated in order, once each; {self.begun.get(block, 0)} is next")
        if block in self.summed and block not in self.used:
            self.late.add(block)
        elif next_backward >= self.last_stage_of.get(block, len(self.profile)) and block not in self.late:
            broken(f"Backward({self.last_stage_of[block]}) still uses block {block}; update it afterwards")

    def _begin_on_host(self, block: int, part: int, needed: list[tuple[Kind, int]]) -> None:
        """All that the update reads and writes is in flight from HOST to HOST until the parameters are waited for."""
        places, values = self.places, [value_of(*one) for one in needed]
        for value, (kind, number) in zip(values, needed, strict=True):
            flight = places.flights.get(value)
            if flight is not None and flight.source is not flight.target:  # a part before may be under way
                broken(f"{places.whereabouts(kind, number)}; put Wait before its update in HOST")
            if kind is not Kind.GRADIENT and flight is None:
                places.write(kind, number, Tier.HOST)
        cost = self.profile.blocks[block]
        places.note_updating(block, cost.update_extra_nbytes)
        job = self.clock.update_on_host(str(block), cost.part_seconds(part, Tier.HOST))
        places.flights.update(dict.fromkeys(values, Flight(Tier.HOST, Tier.HOST, job)))


def _first_uses(profile: Profile) -> dict[int, int]:
    """For each block the stage that uses it first, whose backward is the last to do so."""
    if not profile.blocks:
        return {}
    if isinstance(profile.stages, UniformStages):
        return {} if profile.stages.cost.block is None else {profile.stages.cost.block: 0}
    return {c.block: k for k, c in reversed(list(enumerate(profile.stages))) if c.block is not None}
