"""Which block values a schedule leaves on the device, and when."""

from tapestream.costs import Profile
from tapestream.ir import Free, Kind, Offload, Phase, PhaseKind, Prefetch, Schedule, Tier, Value
from tapestream.passes.memory import block_values
from tapestream.passes.residency import UpdateMode


def resident_of(schedule: Schedule, profile: Profile, update: UpdateMode, found: frozenset[Value]) -> frozenset[Value]:
    """Block values that live on the device: those found there at some moment, and gradients that the schedule never
    sends home."""
    there = {value for value in found if value.kind is not Kind.GRADIENT}
    if update != "backward":
        sent = {a.value for a in schedule if isinstance(a, Offload) and a.value.kind is Kind.GRADIENT}
        trained = (Value(Kind.GRADIENT, b) for b, cost in enumerate(profile.blocks) if cost.gradient_nbytes)
        there.update(value for value in trained if value not in sent)
    return frozenset(there)


def staying_of(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device throughout: between steps too."""
    return at_start(schedule) - {a.value for a in schedule if isinstance(a, Free) and a.tier is Tier.DEVICE}


def at_start(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device when a step begins, and when it ends."""
    return frozenset(value for value, tier in schedule.resident if tier is Tier.DEVICE)


def ever_on_disk(schedule: Schedule) -> frozenset[Value]:
    """Block values that have bytes on disk at some moment."""
    sent = {a.value for a in schedule if isinstance(a, Offload) and a.target is Tier.DISK}
    sent.update(value for value, tier in schedule.resident if tier is Tier.DISK)
    return frozenset(value for value in sent if not value.kind.by_stage)


def at_step_of(schedule: Schedule) -> frozenset[Value]:
    """Block values that are on the device when the step phase begins; without one, when the schedule ends."""
    there = set(at_start(schedule))
    for action in schedule:
        match action:
            case Prefetch(value, _, Tier.DEVICE) if not value.kind.by_stage:  # saved tensors go with their backward
                there.add(value)
            case Free(value, Tier.DEVICE):
                there.discard(value)
            case Phase(PhaseKind.STEP):
                break
            case _:
                pass
    return frozenset(there)


def idle_nbytes(schedule: Schedule, profile: Profile, update: UpdateMode) -> int:
    """Bytes of block values that lie on the device before the schedule's forward, or after its backward."""
    sizes = dict(block_values(profile))
    after = resident_of(schedule, profile, update, at_step_of(schedule))
    return max(sum(sizes.get(value, 0) for value in found) for found in (at_start(schedule), after))
