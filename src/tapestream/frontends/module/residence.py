"""Which block values a plan leaves on the device, and when."""

from tapestream.ir.actions import Free, Kind, Offload, Phase, PhaseKind, Prefetch, Tier, Value
from tapestream.planning.plan import Plan


def resident_of(plan: Plan, update: str | None, found: frozenset[Value]) -> frozenset[Value]:
    """Block values that live on the device: those found there at some moment, and gradients that the plan never
    sends home."""
    there = {value for value in found if value.kind is not Kind.GRADIENT}
    if update != "backward":
        sent = {a.value for a in plan.schedule if isinstance(a, Offload) and a.value.kind is Kind.GRADIENT}
        trained = (Value(Kind.GRADIENT, b) for b, cost in enumerate(plan.profile.blocks) if cost.gradient_nbytes)
        there.update(value for value in trained if value not in sent)
    return frozenset(there)


def staying_of(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device throughout: between steps too."""
    return at_start(plan) - {a.value for a in plan.schedule if isinstance(a, Free) and a.tier is Tier.DEVICE}


def at_start(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device when a step begins, and when it ends."""
    return frozenset(value for value, tier in plan.schedule.resident if tier is Tier.DEVICE)


def at_step_of(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device when the step phase begins; without one, when the schedule ends."""
    there = set(at_start(plan))
    for action in plan.schedule:
        match action:
            case Prefetch(value, _, Tier.DEVICE):
                there.add(value)
            case Free(value, Tier.DEVICE):
                there.discard(value)
            case Phase(PhaseKind.STEP):
                break
            case _:
                pass
    return frozenset(there)
