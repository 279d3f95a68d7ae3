"""Which block values a schedule leaves on the device, and when: whole, or their shards."""

from tapestream.costs import Profile
from tapestream.ir import Free, Kind, Offload, Phase, PhaseKind, Prefetch, Schedule, Tier, Value
from tapestream.passes.memory import block_values
from tapestream.passes.residency import UpdateMode

_ON_DEVICE = (Tier.DEVICE, Tier.SHARD)
_STEP = Phase(PhaseKind.STEP)


def resident_of(schedule: Schedule, profile: Profile, update: UpdateMode, found: frozenset[Value]) -> frozenset[Value]:
    """Block values that live on the device: those found there at some moment, and gradients that the schedule never
    sends home."""
    there = {value for value in found if value.kind is not Kind.GRADIENT}
    if update != "backward":
        home = (a.value for a in schedule if isinstance(a, Offload) and a.target not in _ON_DEVICE)
        sent = {value for value in home if value.kind is Kind.GRADIENT}
        trained = (Value(Kind.GRADIENT, b) for b, cost in enumerate(profile.blocks) if cost.gradient_nbytes)
        there.update(value for value in trained if value not in sent)
    return frozenset(there)


def staying_of(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device throughout: between steps too."""
    there = frozenset(pair for pair in schedule.resident if pair[1] in _ON_DEVICE)
    left = there - {(action.value, action.tier) for action in schedule if isinstance(action, Free)}
    return frozenset(value for value, _ in left)


def at_start(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device when a step begins, and when it ends."""
    return frozenset(value for value, tier in schedule.resident if tier in _ON_DEVICE)


def ever_on_disk(schedule: Schedule) -> frozenset[Value]:
    """Block values that have bytes on disk at some moment."""
    sent = {a.value for a in schedule if isinstance(a, Offload) and a.target is Tier.DISK}
    sent.update(value for value, tier in schedule.resident if tier is Tier.DISK)
    return frozenset(value for value in sent if not value.kind.by_stage)


def at_step_of(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device when the step phase begins; without one, when the schedule ends."""
    there = {pair for pair in schedule.resident if pair[1] in _ON_DEVICE}
    for action in schedule:
        if isinstance(action, Prefetch):
            if action.target in _ON_DEVICE and not action.value.kind.by_stage:  # saved go with backwards
                there.add((action.value, action.target))
        elif isinstance(action, Free):
            there.discard((action.value, action.tier))
        elif isinstance(action, Phase) and action == _STEP:
            break
    return frozenset(value for value, _ in there)


def idle_nbytes(schedule: Schedule, profile: Profile, update: UpdateMode) -> int:
    """Bytes of block values that lie on the device before the schedule's forward, or after its backward. Where that
    updates blocks too, it is the end, where all lies as at the start."""
    sizes, moments = dict(block_values(profile)), [at_start(schedule)]
    if update != "backward":
        moments.append(resident_of(schedule, profile, update, at_step_of(schedule)))
    return max(sum(sizes.get(value, 0) for value in found) for found in moments)
