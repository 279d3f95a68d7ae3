"""Micro-batches: calls whose gradients are added to those that earlier backwards have left."""

from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import tensor_nbytes
from tapestream.costs import Profile
from tapestream.errors import BudgetError
from tapestream.frontends.module.plans.late import Late
from tapestream.frontends.module.plans.prepare import Prepared, planned_again, whole_of
from tapestream.ir.actions import Kind, Tier
from tapestream.passes.residency import uses_of_blocks

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


def gathering(handle: "Streamed", prepared: Prepared, known: MutableMapping[object, Prepared]) -> Prepared:
    """``prepared`` where earlier backwards have left no gradients, and for the user's own plan; else plans for the same
    call that are kept in ``known``: gradients at home on the device count throughout, others all wait at home.

    Raises BudgetError where gradients that have no other home leave too little room.
    """
    if all(p.grad is None for block in handle.store.blocks for p in block.parameters) and not prepared.late.there:
        return prepared
    return after_a_backward(handle, prepared, known)


def after_a_backward(handle: "Streamed", prepared: Prepared, known: MutableMapping[object, Prepared]) -> Prepared:
    """The same, as if an earlier backward had left gradients."""
    if handle.update == "backward" or handle.given is not None:
        return prepared
    if id(prepared) not in known:
        stay = handle.store.home is Tier.DEVICE
        known[id(prepared)] = _beside_gradients(handle, prepared) if stay else _all_sent_home(handle, prepared)
    return known[id(prepared)]


def _all_sent_home(handle: "Streamed", prepared: Prepared) -> Prepared:
    """A first call's plan may keep a gradient on the device until the step. From the second on it would lie there from
    the start."""
    gone = (Kind.GRADIENT, Kind.PARAMETERS) if is_accelerator(handle.device) else (Kind.GRADIENT,)
    resident = frozenset(value for value in prepared.resident if value.kind not in gone)
    made = sum(_made_outside(handle))
    for beside, staying in ((made, resident), (made, frozenset()), (0, frozenset())):
        outside = prepared.profiles[0].outside_nbytes + beside
        profiles = [replace(profile, outside_nbytes=outside) for profile in prepared.profiles]
        with suppress(BudgetError):
            return planned_again(handle, prepared, profiles, Late(), staying, within=whole_of(handle, strict=True))
    return prepared


def _beside_gradients(handle: "Streamed", prepared: Prepared) -> Prepared:
    there = sum(cost.gradient_nbytes for profile in prepared.profiles for cost in profile.blocks)
    made = _made_outside(handle)
    outside = prepared.profiles[0].outside_nbytes + prepared.late.nbytes + there + sum(made)
    outside += sum(map(_summed_nbytes, prepared.profiles))
    profiles = [_beside(profile, outside, max(made, default=0)) for profile in prepared.profiles]
    try:
        return planned_again(handle, prepared, profiles, Late(), None, there)
    except BudgetError as error:
        raise error.saying(
            f"{error.message} (gradients of an earlier backward lie on the device and count: without micro-batches, "
            "call zero_grad() before the forward; with micro-batches, allow that much, or keep blocks off the device "
            "with folder=... or, on a GPU, home='host')"
        ) from None


def _made_outside(handle: "Streamed") -> list[int]:
    """Bytes of gradients that are added to those of parameters outside blocks. Where the head's weight is the
    embedding's, what the head makes of it waits for the end of the backward."""
    return [tensor_nbytes(p) for p in handle.outside_parameters() if p.requires_grad]


def _summed_nbytes(profile: Profile) -> int:
    """Bytes of this call's own gradients of blocks that several stages use: they wait for the last of their backwards,
    and are counted as if they always lay there."""
    uses = uses_of_blocks(profile)
    return sum(cost.gradient_nbytes for block, cost in enumerate(profile.blocks) if uses[block] > 1)


def _beside(profile: Profile, outside: int, added: int) -> Profile:
    """``profile`` beside ``outside`` bytes, all gradients but those that a backward makes for itself alone.
    ``added``: of the largest gradient outside, two of which are added up when no tape is left."""
    uses = uses_of_blocks(profile)
    stages = tuple(
        cost
        if cost.block is None or uses[cost.block] > 1
        else replace(
            cost, backward_extra_nbytes=cost.backward_extra_nbytes + profile.blocks[cost.block].gradient_nbytes
        )
        for cost in profile.stages
    )
    updating = max((cost.update_extra_nbytes for cost in profile.blocks), default=0)  # beside no tape either
    return replace(
        profile,
        stages=stages,
        blocks=tuple(replace(cost, gradient_nbytes=0) for cost in profile.blocks),
        outside_nbytes=outside,
        turn_nbytes=max(profile.turn_nbytes, added, updating),
    )
