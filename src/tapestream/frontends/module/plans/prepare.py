"""From an observed call to plans: one per segment of linked blocks, together within the budget."""

from collections.abc import Container, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import tensor_nbytes, workspaces_nbytes
from tapestream.capture.cells import kept_nbytes
from tapestream.costs import BlockCost, Profile
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError
from tapestream.executor.travel.travel import moved_saved, moves_tape
from tapestream.frontends.module.observing.observed import Observed, Segment
from tapestream.frontends.module.observing.returned import Returned, Turn
from tapestream.frontends.module.plans.advice import advised, after_nbytes, without_cache, without_tables
from tapestream.frontends.module.plans.at_once import Within, for_calls
from tapestream.frontends.module.plans.batch import Sized
from tapestream.frontends.module.plans.block_costs import block_cost
from tapestream.frontends.module.plans.divide import Division
from tapestream.frontends.module.plans.late import Late, late_of
from tapestream.frontends.module.plans.shared import Shared, shared_blocks
from tapestream.frontends.module.plans.step import Step
from tapestream.frontends.module.plans.terms import Terms, Update
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.schedule import run_once
from tapestream.passes.memory import block_values
from tapestream.passes.residence import at_start, at_step_of, ever_on_disk, resident_of, staying_of
from tapestream.planning.plan import Plan
from tapestream.planning.stage_costs import with_behind
from tapestream.runner.stage import left_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

# What an update reads and writes per second where that is not measured: speeds are given, or nothing moves. On an
# accelerator that is the order of what its memory gives: copies must not seem hidden behind updates that are short.
_UPDATE_BYTES_PER_SECOND, _ON_ACCELERATORS = 5e9, 1e12


@dataclass(frozen=True, slots=True)
class Prepared:
    """Plans for one kind of call. ``order``: per block call, its segment and its stage there; ``once``: per segment,
    stages that its plan runs a single time. ``resident``, ``at_step``: what is on the device between two steps, and
    when the step phase begins. ``held_nbytes``: most device bytes that such a call holds beside
    ``shared_nbytes``, which calls that are live together hold once: parameters and what belongs to them.
    ``before_nbytes`` of it: what runs before blocks; ``turn``: what runs behind them.
    ``writes_outside``: whether what runs outside blocks writes buffers. ``main``: the first segment of repeated blocks;
    ``shared``: parameter blocks that several segments use. ``profiles``: of the segments, each as if it were alone.
    ``moving``: per segment, the stages whose saved tensors its plan moves, None where it moves no states either.
    ``pinned``: parameter blocks that are plain tensors on the device; ``watched``: by name, trained parameters that
    nothing but calls of their modules may use. ``late``: gradients that the profiles leave out. ``on_disk``: block
    values that have bytes there at some moment; ``overflowed``: those of them for which the host has no room.
    ``used``: parameter blocks. ``returned``: what such calls give beside their loss; ``batch``: how large it is.
    """

    segments: tuple[Segment, ...]
    plans: tuple[Plan, ...]
    order: tuple[tuple[int, int], ...]
    once: tuple[frozenset[int], ...]
    resident: frozenset[Value]
    at_step: frozenset[Value]
    update: Update
    shared_nbytes: int
    held_nbytes: int
    before_nbytes: int
    writes_outside: bool
    main: int
    shared: Mapping[int, Shared]
    profiles: tuple[Profile, ...]
    pinned: frozenset[int]
    watched: Mapping[str, nn.Parameter]
    late: "Late"
    on_disk: frozenset[Value]
    overflowed: frozenset[Value]
    moving: tuple[Container[int] | None, ...]
    used: frozenset[int]
    turn: Turn = field(default_factory=Turn)
    returned: Returned = field(default_factory=Returned)
    batch: Sized | None = None

    @property
    def plan(self) -> Plan:
        """That of the main segment."""
        return self.plans[self.main]

    def below_host(self, before: frozenset[Value]) -> frozenset[Value]:
        """Values that live on the disk although their kinds do not; those ``before`` that no plan here knows stay."""
        if not before:
            return self.overflowed
        known = {value for profile in self.profiles for value, _ in block_values(profile)}
        return self.overflowed | (before - known)

    @property
    def left_nbytes(self) -> int:
        """Most of ``held_nbytes`` that is the user's graph's: outside of blocks."""
        return self.before_nbytes + self.turn.kept_nbytes


def prepare(handle: "Streamed", observed: Observed) -> Prepared:
    """Plan every segment. The device budget left beside what is always there is divided by the segments' needs.

    Raises BudgetError (with what would help) when one does not fit.
    """
    segments = observed.segments
    shared = shared_blocks(segments, handle.store.uses)
    profiles = _profiles(handle, observed, shared)
    stay = handle.store.home is Tier.DEVICE and handle.update != "backward"
    late = late_of(handle.outside_parameters(), observed.used_first, profiles[0]) if stay else Late()
    outside = profiles[0].outside_nbytes - late.nbytes
    profiles = [replace(profile, outside_nbytes=outside) for profile in profiles]
    try:
        homes = (None,) if handle.last is None else (handle.last.overflowed, None)
        found = _planned(handle, segments, profiles, shared, observed.writes_outside, late, homes)
    except BudgetError as error:
        if handle.cut_finer():
            return prepare(handle, observed)
        left = left_nbytes([one for segment in segments for one in segment.traits])
        error = without_cache(error, observed.left_nbytes, left)
        error = without_tables(error, handle.model, handle.blocks[: handle.wide], handle.homes)
        after = after_nbytes(terms_of(handle), observed)
        named = callable(getattr(handle.model, "get_output_embeddings", None))
        raise advised(error, outside, after, in_chunks=handle.head is not None, named=named) from None
    return replace(found, turn=observed.turn, returned=Returned(observed.turn.results_nbytes))


def without_results(handle: "Streamed", found: Prepared, known: MutableMapping[object, Prepared]) -> Prepared:
    """``found``, or where calls of its kind find what they return dropped when backward begins, and the plan is not the
    user's own nor that of other ranks too, plans with that room, which are kept in ``known``."""
    if not found.returned.dropped or handle.given is not None or handle.ranks.one_plan is not None:
        return found
    key = id(found), "without results"
    if key not in known:
        known[key] = found
        with suppress(BudgetError):  # a planner's list need not hold what fitted before
            known[key] = _with_room(handle, found)
    return known[key]


def _with_room(handle: "Streamed", found: Prepared) -> Prepared:
    less = found.returned.nbytes
    profiles = [replace(one, turn_nbytes=max(0, one.turn_nbytes - less)) for one in found.profiles]
    other = planned_again(handle, found, profiles, found.late)
    return replace(other, returned=found.returned)


def planned_again(
    handle: "Streamed",
    prepared: Prepared,
    profiles: Sequence[Profile],
    late: Late,
    resident: frozenset[Value] | None = None,
    there: int = 0,
    within: Within | None = None,
    on_disk: frozenset[Value] | None = None,
) -> Prepared:
    """Plans for the call of ``prepared`` with other ``profiles``, or ``within`` less than the budget. ``resident``:
    what lies on the device at the start; ``there``: bytes of gradients that earlier backwards have left on it;
    ``on_disk``: what must live there (None: the same as for ``prepared``, or other values where that does not fit)."""
    segments, shared, writes = prepared.segments, prepared.shared, prepared.writes_outside
    homes = (prepared.overflowed, None) if on_disk is None else (on_disk,)
    found = _planned(handle, segments, profiles, shared, writes, late, homes, resident, there, within)
    return replace(found, turn=prepared.turn, batch=prepared.batch)


def _planned(
    handle: "Streamed",
    segments: Sequence[Segment],
    profiles: Sequence[Profile],
    shared: Mapping[int, Shared],
    writes_outside: bool,
    late: Late,
    homes: Sequence[frozenset[Value] | None],
    resident: frozenset[Value] | None = None,
    there: int = 0,
    within: Within | None = None,
) -> Prepared:
    """``homes``: values to live on the disk because the host has no room (None: as plans decide); the first that fit.
    What moves from one to another would move anew with every plan."""
    outside, (first, *others) = profiles[0].outside_nbytes, homes

    def plan(allowed: int) -> Prepared:
        terms = replace(terms_of(handle), on_disk=first)
        plans = Division(terms, segments, profiles, allowed, outside, shared, resident).plans()
        return _assembled(handle, allowed, segments, plans, profiles, shared, writes_outside, late, there)

    try:
        return _placed(handle, for_calls(plan, within or whole_of(handle, strict=False)))
    except BudgetError:
        if not others or not handle.store.homes.overflowing:
            raise
    return _planned(handle, segments, profiles, shared, writes_outside, late, others, resident, there, within)


def _placed(handle: "Streamed", found: Prepared) -> Prepared:
    """The same; where it updates "mixed" blocks, all other plans are to update them, too. Raises InputError where the
    user's own plan updates some elsewhere than the optimizer does."""
    if handle.optimizer is not None:
        updated = [plan.simulation.updated for plan in found.plans]
        on_device, on_host = (
            frozenset[int]().union(*(one.get(tier, frozenset()) for one in updated))
            for tier in (Tier.DEVICE, Tier.HOST)
        )
        handle.optimizer.take_places(on_device, on_host)
    return found


def whole_of(handle: "Streamed", *, strict: bool) -> Within:
    """The handle's whole budget of the device, for as many calls as it says."""
    allowed = handle.budget.device_nbytes
    assert allowed is not None
    return Within(allowed, handle.budget.calls, strict)


def terms_of(handle: "Streamed") -> Terms:
    """On what terms the calls of this model are planned."""
    tables = handle.homes.tables
    budget = handle.homes.limited(handle.budget, 0 if tables.below_is_disk else tables_kept_nbytes(handle))
    return Terms(
        handle.blocks, handle.wide, budget, handle.machine, handle.store.homes, handle.update,
        planner=handle.planner, knobs=handle.knobs, given=handle.given, where=handle.where,
        on_device=None if handle.optimizer is None else handle.optimizer.on_device,
    )  # fmt: skip


def _assembled(
    handle: "Streamed",
    allowed: int,
    segments: Sequence[Segment],
    plans: Sequence[Plan],
    profiles: Sequence[Profile],
    shared: Mapping[int, Shared],
    writes_outside: bool,
    late: Late,
    gathered_nbytes: int,
) -> Prepared:
    """What follows from ``plans`` within ``allowed`` bytes; ``gathered_nbytes``: of gradients that earlier backwards
    have left on the device."""
    resident, at_step = (
        frozenset().union(*(resident_of(p.schedule, p.profile, handle.update, moment(p.schedule)) for p in plans))
        for moment in (at_start, at_step_of)
    )
    order = tuple((s, k) for s, segment in enumerate(segments) for k in range(len(segment.positions)))
    once = tuple(run_once(plan.schedule) for plan in plans)
    staying = [staying_nbytes(plan) for plan in plans]
    inside = sum(plan.peak_nbytes - plan.profile.outside_nbytes for plan in plans) - sum(staying)
    outside = outside_nbytes(handle) + gathered_nbytes
    before = profiles[0].outside_nbytes + late.nbytes - outside
    held = outside + sum(staying)
    pinned = handle.pinned.values()
    main = next((s for s, segment in enumerate(segments) if min(segment.positions) < handle.wide), 0)
    on_disk = frozenset[Value]().union(*(ever_on_disk(plan.schedule) for plan in plans))
    overflowing = handle.store.homes.overflowing
    return Prepared(
        tuple(segments), tuple(plans), order, once, resident | pinned, at_step | pinned, handle.update, held,
        min(before + inside, max(0, allowed - held)), before, writes_outside, main,
        shared, tuple(profiles),
        handle.pinned.blocks, _watched(handle), late,
        on_disk, frozenset(value for value in on_disk if value.kind in overflowing),
        tuple(moved_saved(p.schedule) if moves_tape(p.schedule) else None for p in plans),
        frozenset(b for s in segments for p in s.positions if (b := handle.store.uses[p]) is not None),
    )  # fmt: skip


def staying_nbytes(plan: Plan) -> int:
    """Bytes of block values that a plan leaves on the device throughout."""
    staying = staying_of(plan.schedule)
    return sum(nbytes for value, nbytes in block_values(plan.profile) if value in staying)


def _watched(handle: "Streamed") -> dict[str, nn.Parameter]:
    """Trained parameters, by name, that get their gradients from calls of their modules alone: they come and go, or are
    updated as soon as these arrive."""
    blocks = set(handle.store.uses)
    together = handle.ranks.exchange is not None  # what autograd adds by itself would not be summed
    if not together and handle.update != "backward" and handle.store.homes[Kind.GRADIENT] is Tier.DEVICE:
        blocks = set(handle.store.uses[handle.wide :])
    coming = blocks - handle.pinned.blocks
    found = {id(p) for block in handle.store.blocks if block.index in coming for p in block.parameters}
    return {name: p for name, p in handle.model.named_parameters() if p.requires_grad and id(p) in found}


def outside_nbytes(handle: "Streamed") -> int:
    """Device bytes of parameters outside blocks, with gradients and optimizer state, of all buffers, and of the
    workspaces that products keep."""
    parameters = [*handle.outside_parameters(), *handle.pinned.parameters()]
    total = sum(tensor_nbytes(p) * (2 if p.requires_grad else 1) + handle.state_nbytes(p) for p in parameters)
    total += 0 if handle.optimizer is None else handle.optimizer.scalar_nbytes()
    total += sum(tensor_nbytes(b) for b in handle.model.buffers()) + handle.homes.tables.gradient_nbytes
    total += tables_kept_nbytes(handle) if handle.homes.tables.below_is_disk else 0
    total += handle.ranks.buffers_nbytes(parameters)
    return total + workspaces_nbytes(handle.device)


def tables_kept_nbytes(handle: "Streamed") -> int:
    """Bytes of optimizer state of tables, which is tensors of the CPU."""
    return sum(map(handle.state_nbytes, handle.homes.tables.parameters))


def _update_speed(handle: "Streamed", *, hosted: bool = False) -> float:
    """Bytes that an update, or one in RAM, reads and writes per second. What hides behind updates must not be thought
    to for longer than they take."""
    moves = handle.store.home is not Tier.DEVICE
    asked = handle.timed and moves and handle.optimizer is not None
    found = handle.optimizer.bytes_per_second(hosted=hosted) if asked and handle.optimizer is not None else None
    return found or (_ON_ACCELERATORS if is_accelerator(handle.device) else _UPDATE_BYTES_PER_SECOND)


def _block_costs(handle: "Streamed", speed: float) -> list[BlockCost]:
    """Of all blocks, updated at ``speed`` bytes per second, or in RAM as a machine was said to."""
    rate = None if handle.timed else handle.machine().rates(usual_rates(handle.device.type)).host_updates_per_second
    updated, hosted = handle.update is not None, handle.where != "device"
    there = _update_speed(handle, hosted=True) if hosted else None
    return [
        block_cost(block, speed, updated=updated, hosted_bytes_per_second=there, numbers_per_second=rate)
        for block in handle.store.blocks
    ]


def with_costs_now(handle: "Streamed", profiles: Sequence[Profile]) -> list[Profile]:
    """``profiles`` of a call, whose blocks cost what they do now: the optimizer has taken over more of them since."""
    now, none = _block_costs(handle, _update_speed(handle)), BlockCost(0)  # of another segment
    found = [
        replace(one, blocks=tuple(a if a == none else b for a, b in zip(one.blocks, now, strict=True)))
        for one in profiles
    ]
    return handle.ranks.profiles(found)


def _profiles(handle: "Streamed", observed: Observed, shared: Mapping[int, Shared]) -> list[Profile]:
    """The chains of the segments."""
    traits = [one for segment in observed.segments for one in segment.traits]
    contents = kept_nbytes(one.cells for one in traits) + left_nbytes(traits)
    outside, speed = outside_nbytes(handle) + observed.before_nbytes + contents, _update_speed(handle)
    step = Step(
        terms_of(handle), observed.segments, handle.store.uses,
        _block_costs(handle, speed), shared, outside,
        observed.turn.nbytes, observed.turn.seconds, handle.ranks.shards, handle.ranks.exchanged_nbytes(),
    )  # fmt: skip
    found = []
    for number, segment in enumerate(observed.segments):
        assert segment.travellers is not None
        stages = with_behind(segment.costs, [one.behind_nbytes for one in segment.traits])
        carried = segment.travellers.carried(stages)
        found.append(step.profile(number, stages, segment.initial_nbytes, carried))
    return handle.ranks.profiles(found)
