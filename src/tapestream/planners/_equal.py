"""Chains of equal stages, for planners that take no others."""

from dataclasses import fields

from tapestream.costs import Profile, StageCost, UniformStages
from tapestream.errors import InputError
from tapestream.planners._fit import finite

_SECONDS = ("forward_seconds", "backward_seconds", "record_seconds")


def equal_stages(name: str, profile: Profile, instead: str = "rotor") -> StageCost:
    """The cost of every stage. State 0 may be smaller than the others (the caller's), and the first stage may need
    other seconds and fewer bytes (where its input takes no gradient): it counts as one like the others. InputError:
    they differ otherwise."""
    cost = usual(profile)
    different = _difference(profile, cost)
    if different:
        raise InputError(
            f"{name} is for equal stages (the same seconds and bytes, no carried storages, state 0 no larger than the "
            f"others), but of these {len(profile)}, {different}; use planner {instead!r}, which takes any chain"
        )
    for what in ("forward_seconds", "backward_seconds", "recorded_seconds"):
        finite(name, what, getattr(cost, what))
    return cost


def usual(profile: Profile) -> StageCost:
    """A stage like all others: the second, where there is one."""
    return profile.stages[min(1, len(profile) - 1)]


def _difference(profile: Profile, cost: StageCost) -> str:
    """What keeps the stages from being equal, "" where they are."""
    stages = profile.stages
    if profile.carried:
        return f"{len(profile.carried)} storages pass through several states"
    if profile.initial_nbytes > cost.output_nbytes:
        return f"state 0 takes {profile.initial_nbytes} bytes, the next {cost.output_nbytes}"
    if isinstance(stages, UniformStages):
        return ""
    no_cotangent = cost.cotangent_bytes - profile.cotangent_nbytes(0)
    for k, other in enumerate(stages):
        if other is cost or other == cost:
            continue
        names = [field.name for field in fields(StageCost) if getattr(other, field.name) != getattr(cost, field.name)]
        unlike = [name for name in names if k or not _may_differ(name, other, cost, no_cotangent)]
        if unlike:
            one, like = getattr(other, unlike[0]), getattr(cost, unlike[0])
            return f"stage {k} has {unlike[0]} {one}, stage 1 has {like}"
    return ""


def _may_differ(name: str, first: StageCost, other: StageCost, no_cotangent: int) -> bool:
    """Whether the first stage may have another value than ``other``: seconds, and fewer bytes, where transients may
    take the place of the cotangent that its input, ``no_cotangent`` bytes smaller, does not have."""
    one, like = getattr(first, name), getattr(other, name)
    room = no_cotangent if name == "backward_extra_nbytes" else 0
    return name in _SECONDS or (one is not None and like is not None and one <= like + room)
