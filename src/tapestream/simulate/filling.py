"""What fills a tier at its peak, by kinds of values."""

from collections import Counter

from tapestream.costs import Machine, Profile
from tapestream.ir import Action, Backward, Forward, Kind, Phase, Record, Schedule, Tier, Update
from tapestream.simulate.judge import Judge
from tapestream.simulate.places import number_of
from tapestream.simulate.result import Simulation

_NAMES = {
    Kind.PARAMETERS: "weights", Kind.BUFFERS: "frozen weights", Kind.GRADIENT: "gradients",
    Kind.OPTIMIZER_STATE: "optimizer state", Kind.SAVED: "saved tensors", Kind.INSIDE: "saved tensors",
    Kind.STATE: "states", Kind.COTANGENT: "states",
}  # fmt: skip
ON_DEVICE = (Tier.DEVICE, Tier.SHARD)
_RUNNING = {
    Forward: "a block that runs", Record: "a block that runs", Backward: "a block's backward",
    Phase: "logits and loss", Update: "an update",
}  # fmt: skip


def filling(schedule: Schedule, profile: Profile, machine: Machine | None, found: Simulation) -> Counter[str]:
    """Bytes on the device at its peak, by names for people; they add up to it. ``found``: what `simulate` said.

    Takes as long as judging action by action.
    """
    judge = UpTo(schedule, profile, machine, found.peak_position[Tier.DEVICE])
    judge.run()
    rest = found.peak_nbytes[Tier.DEVICE] - judge.found.total()
    if rest:
        judge.found[_RUNNING.get(type(judge.at), "what comes and goes")] += rest
    return judge.found


class UpTo(Judge):
    """Looks at what the device holds before one action."""

    def __init__(self, schedule: Schedule, profile: Profile, machine: Machine | None, position: int) -> None:
        super().__init__(schedule, profile, machine)
        self._position = position
        self.at: Action | None = None
        self.found: Counter[str] = Counter()

    def obey(self, action: Action) -> None:
        """As ever."""
        if self.memory.position == self._position:
            self.at = action
            self._look()
        super().obey(action)

    def _look(self) -> None:
        places, found = self.places, self.found
        there = {  # in order, unlike a set
            (kind, number, tier): None
            for copies in (places.current, places.stale)
            for kind, values in copies.items()
            for number, tiers in values.items()
            for tier in ON_DEVICE
            if tiers >> tier & 1
        }
        coming = ((value, flight.target) for value, flight in places.flights.items() if flight.target in ON_DEVICE)
        there.update(dict.fromkeys((v.kind, number_of(v.index, v.part), tier) for v, tier in coming))
        for kind, number, tier in there:
            if kind is not Kind.STATE:  # those on the device are in the states
                found[_NAMES[kind]] += places.nbytes_of(kind, number, tier)
        states = self.states
        found["states"] += sum(map(states.nbytes_of, states.holds))
        found["states"] += sum(c.nbytes for c, held in zip(states.carried, states.carriers, strict=True) if held)
        found["outside the blocks"] += self.profile.outside_nbytes
