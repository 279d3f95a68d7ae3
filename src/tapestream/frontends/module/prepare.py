"""From an observed call to plans: one per segment of linked blocks, together within the budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from tapestream.costs import BlockCost, Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.given import fit_given_plan
from tapestream.frontends.module.observe import Observed, Segment
from tapestream.ir.actions import Free, Kind, Offload, Phase, PhaseKind, Prefetch, Tier, Value
from tapestream.ir.schedule import run_once
from tapestream.passes.memory import block_values
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.storage.blocks import ParameterBlock
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

# What a CPU reads or writes per second while an optimizer updates a block: only the order matters for plans.
_UPDATE_BYTES_PER_SECOND = 5e9


Update: TypeAlias = Literal["step", "backward"] | None
"""When blocks are updated; None: no optimizer was made."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Plans for one kind of call. ``order``: per block call, its segment and its stage there; ``once``: per segment,
    stages that its plan runs a single time. ``resident``, ``at_step``: what is on the device between two steps, and
    when the step phase begins. ``held_nbytes``: most device bytes that such a call holds beside
    ``shared_nbytes``, which calls that are live together hold once: parameters and what belongs to them.
    ``writes_outside``: whether what runs outside blocks writes buffers."""

    segments: tuple[Segment, ...]
    plans: tuple[Plan, ...]
    order: tuple[tuple[int, int], ...]
    once: tuple[frozenset[int], ...]
    resident: frozenset[Value]
    at_step: frozenset[Value]
    update: Update
    shared_nbytes: int
    held_nbytes: int
    writes_outside: bool


def prepare(handle: "Streamed", observed: Observed) -> Prepared:
    """Plan every segment. The device budget left beside what is always there is divided by the segments' needs.

    Raises BudgetError (with what would help) when one does not fit.
    """
    segments = observed.segments
    _check_disjoint(handle, segments)
    outside = outside_nbytes(handle) + observed.before_nbytes
    costs = [block_cost(handle, block) for block in handle.store.blocks]
    profiles = [_profile(handle, segment, costs, outside, observed) for segment in segments]
    allowed = handle.budget.device_nbytes
    assert allowed is not None
    try:
        plans = _plans(handle, profiles, allowed, outside)
    except BudgetError as error:
        raise _advised(handle, error, outside, observed.turn_nbytes) from None
    return _prepared(handle, segments, plans, outside - observed.before_nbytes, observed.writes_outside)


def prepare_beside(handle: "Streamed", prepared: Prepared, live: Sequence[Prepared]) -> Prepared:
    """Plans for the same call in what ``live`` calls leave of the budget; the same values stay on the device.

    Whichever runs while the others wait, all stay within the budget: ``shared_nbytes`` and the ``held_nbytes`` of
    each. Raises BudgetError where too little is left.
    """
    allowed = handle.budget.device_nbytes
    assert allowed is not None
    left, resident = allowed - sum(call.held_nbytes for call in live), live[-1].resident
    if prepared.resident == resident and prepared.shared_nbytes + prepared.held_nbytes <= left:
        return prepared
    profiles = [plan.profile for plan in prepared.plans]
    try:
        plans = _plans(handle, profiles, left, profiles[0].outside_nbytes, resident)
    except BudgetError as error:
        if error.least_nbytes is None:
            raise  # the host or the disk is too small
        raise BudgetError(
            f"a budget of {format_nbytes(allowed)} was asked for; {format_nbytes(allowed - left)} of it are held by "
            f"{len(live)} call(s) of this model whose backward has not run yet, and this call, parameters included, "
            f"needs {format_nbytes(error.least_nbytes)}: run that backward first, drop its result, or allow more"
        ) from None
    return _prepared(handle, prepared.segments, plans, outside_nbytes(handle), prepared.writes_outside)


def _advised(handle: "Streamed", error: BudgetError, outside: int, turn_nbytes: int) -> BudgetError:
    """``error``, with what helps where the logits and the loss take most of what the blocks' parts need."""
    if handle.head is not None or error.least_nbytes is None or 2 * turn_nbytes <= error.least_nbytes - outside:
        return error
    return BudgetError(
        f"{error}. What runs after the blocks (the head, its logits, the loss) makes {format_nbytes(turn_nbytes)} of "
        "that: if it is a linear layer and F.cross_entropy, stream(..., loss_chunks='auto') never makes all logits",
        least_nbytes=error.least_nbytes,
        stage=error.stage,
    )


def _plans(
    handle: "Streamed",
    profiles: Sequence[Profile],
    allowed: int,
    outside: int,
    resident: frozenset[Value] | None = None,
) -> list[Plan]:
    if handle.given is not None:
        if len(profiles) > 1:
            raise InputError(f"plan= is for one chain of blocks, this model has {len(profiles)}; use plan=None")
        budget = Budget(allowed, host=handle.budget.host_nbytes, disk=handle.budget.disk_nbytes)
        return [fit_given_plan(handle.given, profiles[0], budget)]
    shares = _divided(handle, profiles, allowed, outside)
    return [
        _plan(handle, profile, outside + nbytes, resident) for profile, nbytes in zip(profiles, shares, strict=True)
    ]


def _prepared(
    handle: "Streamed", segments: Sequence[Segment], plans: Sequence[Plan], outside: int, writes_outside: bool
) -> Prepared:
    """``outside``: bytes outside the blocks that all calls share."""
    resident = frozenset().union(*(_resident(plan, handle.update, _at_start(plan)) for plan in plans))
    at_step = frozenset().union(*(_resident(plan, handle.update, _at_step(plan)) for plan in plans))
    order = tuple((s, k) for s, segment in enumerate(segments) for k in range(len(segment.positions)))
    once = tuple(run_once(plan.schedule) for plan in plans)
    staying = [sum(nbytes for v, nbytes in block_values(plan.profile) if v in _staying(plan)) for plan in plans]
    inside = sum(plan.peak_nbytes - plan.profile.outside_nbytes for plan in plans) - sum(staying)
    before = plans[0].profile.outside_nbytes - outside
    shared = outside + sum(staying)
    return Prepared(
        tuple(segments), tuple(plans), order, once, resident, at_step, handle.update, shared, before + inside,
        writes_outside,
    )  # fmt: skip


def _check_disjoint(handle: "Streamed", segments: Sequence[Segment]) -> None:
    """Each chain has its own plan, which moves and updates its blocks: no block may be in two."""
    owner: dict[int, int] = {}
    for number, segment in enumerate(segments):
        for position in segment.positions:
            block = handle.store.uses[position]
            if block is not None and owner.setdefault(block, number) != number:
                raise InputError(
                    f"block {position} ({type(handle.blocks[position]).__name__}), or one that shares its "
                    f"parameters, is called in more than one chain: "
                    "something other than blocks changes the state between its calls; this is not supported yet: "
                    "move that into a block"
                )


def _resident(plan: Plan, update: str | None, found: frozenset[Value]) -> frozenset[Value]:
    """Block values that live on the device: those found there at some moment, and gradients that the plan never
    sends home."""
    there = {value for value in found if value.kind is not Kind.GRADIENT}
    if update != "backward":
        sent = {a.value for a in plan.schedule if isinstance(a, Offload) and a.value.kind is Kind.GRADIENT}
        trained = (Value(Kind.GRADIENT, b) for b, cost in enumerate(plan.profile.blocks) if cost.gradient_nbytes)
        there.update(value for value in trained if value not in sent)
    return frozenset(there)


def _staying(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device throughout: between steps too."""
    return _at_start(plan) - {a.value for a in plan.schedule if isinstance(a, Free) and a.tier is Tier.DEVICE}


def _at_start(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device when a step begins, and when it ends."""
    return frozenset(value for value, tier in plan.schedule.resident if tier is Tier.DEVICE)


def _at_step(plan: Plan) -> frozenset[Value]:
    """Block values that are on the device when the step phase begins; without one, when the schedule ends."""
    there = set(_at_start(plan))
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


def _plan(handle: "Streamed", profile: Profile, nbytes: int, resident: frozenset[Value] | None = None) -> Plan:
    budget = Budget(nbytes, host=handle.budget.host_nbytes, disk=handle.budget.disk_nbytes)
    home = handle.store.homes
    return make_plan(
        profile, budget, handle.machine(),
        planner=handle.planner, update=handle.update, home=home, resident=resident, **handle.knobs,
    )  # fmt: skip


def _divided(handle: "Streamed", profiles: Sequence[Profile], allowed: int, outside: int) -> list[int]:
    """Bytes for each segment beside what is always there: what it cannot do without, and of the rest in proportion to
    its needs.

    Raises BudgetError when the sum of the least is too much.
    """
    room = allowed - outside
    if len(profiles) == 1 and room > 0:
        return [room]  # the planner's own message is the best one
    least = [_least(handle, profile, outside) for profile in profiles]
    if sum(least) > room:
        raise BudgetError(
            f"a budget of {format_nbytes(allowed)} was asked for, but what lies outside the blocks (parameters, "
            f"their gradients and optimizer "
            f"state, buffers, embeddings) takes {format_nbytes(outside)} and the blocks need at least "
            f"{format_nbytes(sum(least))} beside it; allow "
            f"{outside + sum(least)} bytes, use a smaller batch, or name more blocks with blocks=[...]",
            least_nbytes=outside + sum(least),
        )
    return [a + b for a, b in zip(least, _shares(profiles, room - sum(least)), strict=True)]


def _least(handle: "Streamed", profile: Profile, outside: int) -> int:
    try:
        _plan(handle, profile, outside + 1)
    except BudgetError as error:
        if error.least_nbytes is None:
            raise  # the host or the disk is too small
        return error.least_nbytes - outside
    return 1


def outside_nbytes(handle: "Streamed") -> int:
    """Device bytes of parameters outside blocks, with gradients and optimizer state, and of all buffers."""
    total = sum(p.nbytes * (2 if p.requires_grad else 1) + handle.state_nbytes(p) for p in handle.outside_parameters())
    return total + sum(b.nbytes for b in handle.model.buffers())


def block_cost(handle: "Streamed", block: ParameterBlock) -> BlockCost:
    """Bytes and seconds of one parameter block under the handle's optimizer."""
    parameters = block.layout.nbytes
    state = 0 if block.state_layout is None else block.state_layout.nbytes
    gradient = parameters if block.trainable else 0
    largest = max((p.nbytes for p in block.parameters if p.requires_grad), default=0)
    return BlockCost(
        parameters,
        gradient_nbytes=gradient,
        optimizer_state_nbytes=state if handle.update else 0,
        update_seconds=(2 * parameters + gradient + 2 * state) / _UPDATE_BYTES_PER_SECOND,
        # The rule's own temporaries: two of the size of the tensor at hand.
        update_extra_nbytes=2 * largest,
    )


def _profile(
    handle: "Streamed", segment: Segment, costs: Sequence[BlockCost], outside: int, observed: Observed
) -> Profile:
    """The segment's chain. Blocks of other segments cost nothing here."""
    uses = [handle.store.uses[position] for position in segment.positions]
    mine = {block for block in uses if block is not None}
    blocks = tuple(cost if i in mine else BlockCost(0) for i, cost in enumerate(costs))
    stages = list(segment.costs)
    assert segment.travellers is not None
    carried = segment.travellers.carried(stages)
    for k, block in enumerate(uses):
        extra = stages[k].backward_extra_nbytes
        if block is not None and handle.update != "backward":
            # Gradients come as tensors of their own and are laid out in one run of bytes when backward has ended.
            extra = max(extra, costs[block].gradient_nbytes)
        stages[k] = replace(stages[k], block=block, backward_extra_nbytes=extra)
    return Profile(
        tuple(stages),
        segment.initial_nbytes,
        blocks,
        carried,
        outside_nbytes=outside,
        turn_nbytes=observed.turn_nbytes,
        turn_seconds=observed.turn_seconds,
    )


def _shares(profiles: Sequence[Profile], nbytes: int) -> list[int]:
    needs = [
        sum(cost.saved_nbytes + cost.output_nbytes for cost in profile.stages)
        + sum(b.parameters_nbytes + b.gradient_nbytes for b in profile.blocks)
        for profile in profiles
    ]
    total = max(1, sum(needs))
    return [nbytes * need // total for need in needs]
