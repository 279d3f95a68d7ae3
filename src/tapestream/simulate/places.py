"""Places: in which tiers each value has a copy, and which copies are on their way."""

from collections.abc import Callable
from dataclasses import dataclass

from tapestream.costs import Profile
from tapestream.costs.profile import sharded
from tapestream.ir import Kind, Tier, Value
from tapestream.simulate import shards
from tapestream.simulate.clock import Clock, Job, lane_of
from tapestream.simulate.explain import broken, name_of
from tapestream.simulate.memory import IN_MEMORY, Memory, States

DEVICE = Tier.DEVICE
_TIERS = tuple(Tier)  # to go through the class itself takes longer
BLOCK_KINDS = (Kind.PARAMETERS, Kind.BUFFERS, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
# Nothing in a schedule makes these again, so the last current copy must not be dropped.
_IRREPLACEABLE = frozenset((Kind.PARAMETERS, Kind.BUFFERS, Kind.OPTIMIZER_STATE, Kind.COTANGENT))
_PART = 1 << 40  # more than there are stages or blocks


def number_of(index: int, part: int) -> int:
    """What `Places` knows a value of some kind by: its index, with parts after the first far above."""
    return index + part * _PART


def value_of(kind: Kind, number: int) -> Value:
    """The inverse of `number_of`."""
    part, index = divmod(number, _PART)
    return Value(kind, index, part)


@dataclass(frozen=True, slots=True)
class Flight:
    """A copy between its start and its Wait."""

    source: Tier
    target: Tier
    job: Job | None


class Places:
    """Current and stale copies of every value as sets of tiers (bit 1 << tier), by kind and number (`number_of`).

    The device copies of states are not in these sets but in `States`, because several holders share them.
    """

    __slots__ = (
        "_nbytes_of",
        "clock",
        "current",
        "flights",
        "memory",
        "moved",
        "profile",
        "recorded",
        "shards",
        "stale",
        "states",
        "updating",
    )

    def __init__(self, profile: Profile, memory: Memory, states: States, clock: Clock) -> None:
        self.profile = profile
        self.memory = memory
        self.states = states
        self.clock = clock
        self.current: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
        self.stale: dict[Kind, dict[int, int]] = {kind: {} for kind in Kind}
        self.recorded = self.current[Kind.SAVED]
        self.flights: dict[Value, Flight] = {}
        self.moved: dict[tuple[Tier, Tier], int] = {}
        self.updating: dict[int, int] = {}  # blocks with updates under way on the host, and what one of these makes
        stages, blocks, self.shards = profile.stages, profile.blocks, profile.shards
        self._nbytes_of: dict[Kind, Callable[[int], int]] = {
            Kind.STATE: profile.full_state_nbytes,
            Kind.SAVED: lambda k: stages[k].saved_nbytes,
            Kind.INSIDE: lambda k: stages[k].inside_nbytes,
            Kind.COTANGENT: profile.cotangent_nbytes,
            Kind.PARAMETERS: lambda block: blocks[block].parameters_nbytes,
            Kind.BUFFERS: lambda block: blocks[block].buffers_nbytes,
            Kind.GRADIENT: lambda block: blocks[block].gradient_nbytes,
            Kind.OPTIMIZER_STATE: self._part_nbytes,
        }

    def nbytes_of(self, kind: Kind, number: int, tier: Tier = DEVICE) -> int:
        """Bytes of one copy, that in ``tier``."""
        of = self._nbytes_of.get(kind)
        nbytes = of(number) if of is not None else 0
        return nbytes if self.shards == 1 or kind.by_stage else sharded(nbytes, kind, tier, self.shards)

    def _part_nbytes(self, number: int) -> int:
        part, index = divmod(number, _PART)
        return self.profile.blocks[index].parts[part]

    def check(self, value: Value) -> None:
        """The profile must know the value."""
        if value.kind in BLOCK_KINDS:
            count = len(self.profile.blocks)
        else:
            count = len(self.profile) + (value.kind in (Kind.STATE, Kind.COTANGENT))
        parts = 1
        if value.kind is Kind.OPTIMIZER_STATE and 0 <= value.index < count:
            parts = len(self.profile.blocks[value.index].parts)
        if not 0 <= value.index < count or not 0 <= value.part < parts:
            broken(
                f"there is no {name_of(value)}: the profile has {count} of this kind, numbered from 0, "
                f"of {parts if parts > 1 else 'one'} part{'s' * (parts > 1)}"
            )

    def is_current(self, value: Value, tier: Tier) -> bool:
        """True when compute may read the value in ``tier``."""
        if value.kind is Kind.STATE and tier is DEVICE:
            flight = self.flights.get(value)
            return value.index in self.states.holds and not (flight and flight.target is DEVICE)
        return bool(self.current[value.kind].get(number_of(value.index, value.part), 0) >> tier & 1)

    def whereabouts(self, kind: Kind, number: int) -> str:
        """For messages: every copy of the value."""
        value = value_of(kind, number)
        words = [f"current in {tier.name}" for tier in Tier if self.is_current(value, tier)]
        words += [f"stale in {tier.name}" for tier in Tier if self.stale[kind].get(number, 0) >> tier & 1]
        if flight := self.flights.get(value):
            same = flight.source is flight.target
            path = f"in flight from {flight.source.name} to {flight.target.name}"
            words.append("being updated in HOST" if same else path)
        return f"{name_of(value)} is {', '.join(words) or 'nowhere'}"

    def make(self, kind: Kind, number: int, tier: Tier = DEVICE) -> None:
        """A new current copy in ``tier``, where there was none."""
        copies = self.current[kind]
        copies[number] = copies.get(number, 0) | 1 << tier
        self.memory.nbytes[IN_MEMORY[tier]] += self.nbytes_of(kind, number, tier)

    def drop_all(self, kind: Kind, number: int) -> None:
        """Every copy goes."""
        if self.flights and (flight := self.flights.get(value_of(kind, number))):
            broken(f"this drops {kind.name} {number} while it is in flight to {flight.target.name}; put Wait before it")
        tiers = self.current[kind].pop(number, 0) | self.stale[kind].pop(number, 0)
        for tier in _TIERS if tiers else ():
            if tiers >> tier & 1:
                self.memory.nbytes[IN_MEMORY[tier]] -= self.nbytes_of(kind, number, tier)

    def write(self, kind: Kind, number: int, tier: Tier) -> None:
        """The copy in ``tier`` changes, so those elsewhere are stale from now on."""
        if self.flights and (flight := self.flights.get(value := value_of(kind, number))):
            broken(f"this writes {name_of(value)} while it is in flight to {flight.target.name}; put Wait before it")
        others = self.current[kind][number] & ~(1 << tier)
        if others:
            self.current[kind][number] = 1 << tier
            self.stale[kind][number] = self.stale[kind].get(number, 0) | others

    def release(self, k: int) -> None:
        """One holder of state ``k`` on the device fewer; its copies must not be in flight when the last one goes."""
        if not self.states.release(k) or not self.flights:
            return
        flight = self.flights.get(Value(Kind.STATE, k))
        if flight and DEVICE in (flight.source, flight.target):
            broken(
                f"this drops STATE {k} on DEVICE while it is in flight from {flight.source.name} to "
                f"{flight.target.name}; put Wait before it"
            )

    def copy(self, value: Value, source: Tier, target: Tier) -> None:
        """Offload, Prefetch."""
        self.check(value)
        kind, number = value.kind, number_of(value.index, value.part)
        if kind is Kind.INSIDE:
            broken(f"{name_of(value)} stays on DEVICE until its Record; Free it, or leave out its KeepInside")
        if value in self.flights:
            broken(f"{self.whereabouts(kind, number)}; a value has at most one copy in flight, put Wait before this")
        if not self.is_current(value, source):
            broken(f"{self.whereabouts(kind, number)}, so it cannot be copied from {source.name}")
        if self.is_current(value, target):
            broken(f"{self.whereabouts(kind, number)}: there is nothing to copy, leave this action out")
        nbytes = self.nbytes_of(kind, number)
        if self.shards > 1 or Tier.SHARD in (source, target):
            nbytes = shards.start(self, value, source, target, nbytes)
        if kind is Kind.STATE and target is DEVICE:
            self.states.kept.add(number)
            self.states.hold(number)
        elif self.stale[kind].get(number, 0) >> target & 1:
            self.stale[kind][number] &= ~(1 << target)
        else:
            self.memory.nbytes[IN_MEMORY[target]] += self.nbytes_of(kind, number, target)
        self.memory.touch(IN_MEMORY[target])
        copies = self.profile.stages[number].saved_storages if kind is Kind.SAVED else 1
        job = self.clock.issue(self._name(value), source, target, nbytes, copies)
        self.flights[value] = Flight(source, target, job)
        lane = lane_of(source, target)
        self.moved[lane] = self.moved.get(lane, 0) + nbytes

    def _name(self, value: Value) -> str:
        """For a timeline; nothing where none is drawn, as that takes time."""
        return "" if self.clock.spans is None else name_of(value)

    def wait(self, value: Value, tier: Tier) -> None:
        """Wait."""
        flight, number = self.flights.get(value), number_of(value.index, value.part)
        if flight is None or flight.target is not tier:
            self.check(value)
            broken(f"{self.whereabouts(value.kind, number)}, not in flight to {tier.name}")
        if flight.source is tier:
            self._updated(value, flight.job)
            return
        del self.flights[value]
        self.clock.wait(self._name(value), flight.source, flight.target, flight.job)
        if self.shards > 1:
            shards.arrived(self, value, flight.source, tier)
        if value.kind is not Kind.STATE or tier is not DEVICE:
            copies = self.current[value.kind]
            copies[number] = copies.get(number, 0) | 1 << tier

    def _updated(self, value: Value, job: Job | None) -> None:
        """Wait, for an update on the host: its block's parameters stand for all that it has read and written."""
        if value.kind is not Kind.PARAMETERS:
            broken(f"an update of block {value.index} uses {name_of(value)}; wait for PARAMETERS {value.index} in HOST")
        self.clock.wait(f"Update {value.index}", Tier.HOST, Tier.HOST, job)
        for other in [v for v, f in self.flights.items() if f.source is f.target and v.index == value.index]:
            del self.flights[other]
        self.note_updating(value.index, None)

    def note_updating(self, block: int, extra: int | None) -> None:
        """Updates of a block on the host begin (None: have ended). They run one after the other, so that the bytes of
        one count: the most that any makes."""
        before = max(self.updating.values(), default=0)
        if extra is None:
            self.updating.pop(block, None)
        else:
            self.updating[block] = extra
        self.memory.nbytes[Tier.HOST] += max(self.updating.values(), default=0) - before
        self.memory.touch(Tier.HOST)

    def free(self, value: Value, tier: Tier) -> None:
        """Free."""
        self.check(value)
        kind, number = value.kind, number_of(value.index, value.part)
        flight = self.flights.get(value)
        if flight and tier in (flight.source, flight.target):
            broken(f"{self.whereabouts(kind, number)}; put Wait before Free")
        if kind is Kind.STATE and tier is DEVICE:
            if number not in self.states.kept:
                broken(f"STATE {number} is not kept on DEVICE, so there is nothing to free")
            self.states.kept.remove(number)
            self.release(number)
            return
        current, stale, bit = self.current[kind].get(number, 0), self.stale[kind].get(number, 0), 1 << tier
        if not (current | stale) & bit:
            broken(f"{self.whereabouts(kind, number)}, so there is nothing to free in {tier.name}")
        if self.shards > 1:
            shards.check_free(self, kind, number, tier)
        if current == bit and kind in _IRREPLACEABLE:
            broken(f"{self.whereabouts(kind, number)}: this is its last current copy, copy it elsewhere first")
        self.memory.nbytes[IN_MEMORY[tier]] -= self.nbytes_of(kind, number, tier)
        self.stale[kind][number] = stale & ~bit
        if current & ~bit:
            self.current[kind][number] = current & ~bit
        elif current:
            del self.current[kind][number]
            if kind is Kind.SAVED:
                self.forget(number)

    def forget(self, stage: int) -> None:
        """The record of ``stage`` is gone: the tape no longer holds the states that its backward reads."""
        cost = self.profile.stages[stage]
        if cost.reads_input:
            self.release(stage)
        if cost.reads_output:
            self.release(stage + 1)
