"""The instruction set: what a schedule may tell the executor to do.

Stages are numbered 0 .. n-1; stage k maps state k to state k+1. Parameter blocks are numbered on their own.
The rules that each action must obey are checked by `tapestream.simulate`, nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias


class Tier(IntEnum):
    """A place for copies, fastest first. With ``device="cpu"`` DEVICE is RAM and the tier below is DISK.

    SHARD is for blocks whose bytes are divided among ranks: a copy there is this rank's own shard, on its device. The
    tiers below hold shards too; copies on DEVICE are whole.
    """

    DEVICE = 0
    SHARD = 1
    HOST = 2
    DISK = 3

    __hash__ = int.__hash__  # enum's own is Python code, and the judge looks up tiers and kinds all the time

    @property
    def memory(self) -> "Tier":
        """Whose bytes a copy takes."""
        return _MEMORY_OF[self]


_MEMORY_OF = (Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK)
MEMORIES = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers that are memories of their own."""


class Kind(Enum):
    """What a value is. The first six are numbered by stage, the others by parameter block."""

    STATE = "state"
    SAVED = "saved"
    INSIDE = "inside"
    INPUT = "input"
    SIDE_GRADIENT = "side_gradient"
    COTANGENT = "cotangent"
    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"

    __hash__ = object.__hash__

    @property
    def by_stage(self) -> bool:
        """True when the index of such a value is a stage (or state), False when it is a block."""
        return self in _BY_STAGE


_BY_STAGE = (Kind.STATE, Kind.SAVED, Kind.INSIDE, Kind.INPUT, Kind.SIDE_GRADIENT, Kind.COTANGENT)


class Value(NamedTuple):
    """Something that occupies bytes: a kind and a stage or block number; ``part`` numbers its pieces."""

    kind: Kind
    index: int  # type: ignore[assignment]  # not where a tuple has something
    part: int = 0


class PhaseKind(Enum):
    """The user's call that the actions after a `Phase` belong to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Forward:
    """This action is read as: advance the live state from ``start`` to ``stop``, keep nothing."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Record:
    """This action is read as: run one stage on the live state and keep its saved tensors."""

    stage: int


@dataclass(frozen=True, slots=True)
class Backward:
    """This action is read as: turn cotangent ``stage+1`` into cotangent ``stage``, consuming the saved tensors."""

    stage: int


@dataclass(frozen=True, slots=True)
class Keep:
    """This action is read as: keep the live state, which is state ``stage``, as restart checkpoint."""

    stage: int


@dataclass(frozen=True, slots=True)
class KeepInside:
    """This action is read as: the run of stage ``stage`` that comes next keeps what it makes inside and its Record
    need not make again."""

    stage: int


@dataclass(frozen=True, slots=True)
class Restore:
    """This action is read as: make the restart checkpoint ``stage`` the live state again (it stays kept)."""

    stage: int


@dataclass(frozen=True, slots=True)
class Offload:
    """This action is read as: start a copy of ``value`` from ``source`` to the slower tier ``target``."""

    value: Value
    source: Tier
    target: Tier


@dataclass(frozen=True, slots=True)
class Prefetch:
    """This action is read as: start a copy of ``value`` from ``source`` to the faster tier ``target``."""

    value: Value
    source: Tier
    target: Tier


@dataclass(frozen=True, slots=True)
class Wait:
    """This action is read as: compute goes on only when the copy of ``value`` into ``tier`` is complete."""

    value: Value
    tier: Tier


@dataclass(frozen=True, slots=True)
class Free:
    """This action is read as: drop the bytes that ``value`` has in ``tier``."""

    value: Value
    tier: Tier


@dataclass(frozen=True, slots=True)
class Update:
    """This action is read as: apply the optimizer's rule to what part ``part`` of block ``block``'s optimizer state
    covers, on the device. In HOST the update is only begun: ``Wait(PARAMETERS block, HOST)`` ends it."""

    block: int
    part: int = 0
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class Phase:
    """This action is read as: what follows happens in the user's ``kind`` call."""

    kind: PhaseKind


Action: TypeAlias = (
    Forward | Record | Backward | Keep | KeepInside | Restore | Offload | Prefetch | Wait | Free | Update | Phase
)


def shifted(action: Action, by: int) -> Action:
    """The same action ``by`` stages later; block numbers and phases stay."""
    if by == 0:
        return action
    if isinstance(action, Forward):  # listing a schedule takes mostly this; a `match` takes longer
        return Forward(action.start + by, action.stop + by)
    if isinstance(action, (Record, Backward, Keep, KeepInside, Restore)):
        return type(action)(action.stage + by)
    if isinstance(action, (Offload, Prefetch)):
        return type(action)(_shifted_value(action.value, by), action.source, action.target)
    if isinstance(action, (Wait, Free)):
        return type(action)(_shifted_value(action.value, by), action.tier)
    return action


def _shifted_value(value: Value, by: int) -> Value:
    return Value(value.kind, value.index + by, value.part) if value.kind.by_stage else value


def renumbered(action: Action, place: Mapping[int, int] | Sequence[int]) -> Action:
    """The same action with its stages and states at other places: number k at ``place[k]``; blocks and phases stay."""
    match action:
        case Forward(start, stop):
            return Forward(place[start], place[stop])
        case Record(stage) | Backward(stage) | Keep(stage) | KeepInside(stage) | Restore(stage):
            return type(action)(place[stage])
        case Offload(value, source, target) | Prefetch(value, source, target) if value.kind.by_stage:
            return type(action)(Value(value.kind, place[value.index], value.part), source, target)
        case Wait(value, tier) | Free(value, tier) if value.kind.by_stage:
            return type(action)(Value(value.kind, place[value.index], value.part), tier)
        case _:
            return action
