"""What micro-batches cost that pass each block together, from what each of them costs by itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.costs import Profile, StageCost
from tapestream.frontends.module.plans.late import Late
from tapestream.frontends.module.plans.prepare import Prepared, planned_again
from tapestream.ir.actions import PhaseKind

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


def planned_together(handle: "Streamed", found: Sequence[Prepared], count: int, apart_nbytes: int) -> Prepared:
    """Plans for one call of ``count`` micro-batches, each of one of the shapes whose own plans are ``found``.
    ``apart_nbytes``: see `joint_profiles`. Raises BudgetError."""
    together = planned_again(handle, found[0], joint_profiles(handle, found, count, apart_nbytes), Late())
    if together.batch is None:
        return together
    (samples, *others), unit = together.batch
    return replace(together, batch=((count * samples, *others), unit))


def joint_profiles(handle: "Streamed", found: Sequence[Prepared], count: int, apart_nbytes: int = 0) -> list[Profile]:
    """Those of the segments, where each micro-batch costs what the largest does.

    Blocks, their gradients and their updates cost what they do for one micro-batch. States, the seconds of runs and
    what lies between the blocks are there once for each. What a run saves, and its temporary bytes, are there once: one
    is differentiated after the other. That backward includes the recompute. ``apart_nbytes``: of gradients of
    parameters outside of the blocks that are made for each of them apart.
    """
    first = found[0]
    added = max((tensor_nbytes(p) for p in handle.outside_parameters() if p.requires_grad), default=0)
    outside = max(one.profiles[0].outside_nbytes + one.late.nbytes for one in found) + added + apart_nbytes
    outside += (count - 1) * max(one.before_nbytes for one in found)
    return [_joint([one.profiles[s] for one in found], count, outside) for s in range(len(first.profiles))]


def _joint(profiles: Sequence[Profile], count: int, outside: int) -> Profile:
    first = profiles[0]
    most = max(profiles, key=lambda profile: sum(one.nbytes for one in profile.carried))
    return replace(
        first,
        stages=tuple(
            _joint_stage([profile.stages[k] for profile in profiles], count, _gradient_nbytes(first, k))
            for k in range(len(first))
        ),
        initial_nbytes=count * max(profile.initial_nbytes for profile in profiles),
        carried=most.carried * count,
        outside_nbytes=outside,
        turn_nbytes=max(profile.turn_nbytes for profile in profiles),
        turn_seconds=count * max(profile.turn_seconds for profile in profiles),
    )


def _joint_stage(costs: Sequence[StageCost], count: int, gradient_nbytes: int) -> StageCost:
    """``gradient_nbytes``: of what each micro-batch adds to the sum."""
    running = [c.saved_nbytes + c.output_nbytes + max(c.recorded_extra_nbytes, c.backward_extra_nbytes) for c in costs]
    return StageCost(
        forward_seconds=count * max(c.forward_seconds for c in costs),
        backward_seconds=count * max(c.backward_seconds for c in costs),
        output_nbytes=count * max(c.output_nbytes for c in costs),
        saved_nbytes=0,
        forward_extra_nbytes=max(c.forward_extra_nbytes for c in costs),
        backward_extra_nbytes=max(running) + gradient_nbytes,
        cotangent_nbytes=count * max(c.cotangent_bytes for c in costs),
        block=costs[0].block,
        record_seconds=count * max(c.recorded_seconds for c in costs),
    )


def _gradient_nbytes(profile: Profile, k: int) -> int:
    block = profile.stages[k].block
    return 0 if block is None else profile.blocks[block].gradient_nbytes


def joint_seconds(together: Prepared) -> float:
    """Of one call of all micro-batches, without the step. Stages that a plan records in the forward run once more."""
    again = sum(
        plan.profile.stages[k].recorded_seconds
        for plan, once in zip(together.plans, together.once, strict=True)
        for k in once
    )
    return again + seconds_of_calls([together])


def seconds_of_calls(prepared: Sequence[Prepared]) -> float:
    """Of forwards and backwards, without the step."""
    plans = [plan for one in prepared for plan in one.plans]
    return sum(plan.seconds - plan.simulation.phase_seconds.get(PhaseKind.STEP, 0.0) for plan in plans)
