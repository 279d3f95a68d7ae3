"""Parameter streaming: bring parameter blocks in just before they are needed, send them home afterwards."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Kind,
    Node,
    Phase,
    PhaseKind,
    Record,
    Schedule,
    Tier,
    Value,
    distinct_nodes,
    series,
)
from tapestream.ir.homes import HomeLike, home_tiers
from tapestream.passes.memory import block_values, updates_of
from tapestream.passes.residency import UpdateMode, traffic, uses_of_blocks
from tapestream.passes.stays import Occupancy
from tapestream.passes.streaming import Streaming, lying
from tapestream.units import format_nbytes


def stream_parameters(
    schedule: Schedule,
    profile: Profile,
    budget: Budget | None,
    machine: Machine | None,
    *,
    home: HomeLike,
    update: UpdateMode,
    resident: frozenset[Value] = frozenset(),
    accumulate: bool = False,
) -> Schedule:
    """Add the copies of parameter blocks, just in time and one after the other, to a schedule of computation alone.

    ``home``: the tier where values live that are not in ``resident``, or one for each kind; those in it stay on
    the device. ``update``: ``"step"`` sends gradients home and appends a step phase that updates each block once,
    ``"backward"`` updates a block right after its last backward, None leaves gradients (of blocks that have them) at
    home. (Of blocks that are divided among ranks, what stays on the device is their shards.)
    ``accumulate``: gradients of earlier micro-batches exist already, are added to, and nothing is updated. Two
    hops where ``machine`` has no direct link.

    `hoist` then moves the copies to where they cost no time. Linear in the schedule's length; its tree is kept
    when nothing is streamed. Raises BudgetError where copies are needed and the budget cannot hold some action
    and its blocks at once, InputError when ``machine`` lacks a link.
    """
    sizes = dict(block_values(profile))
    if not sizes:
        return schedule
    update = None if accumulate else update
    homes = home_tiers(home)
    if homes[Kind.PARAMETERS] is Tier.DEVICE:
        resident = frozenset(sizes)
    where = tuple(lying(sizes, homes, resident, accumulate))
    if (
        profile.shards == 1
        and update != "backward"
        and all(value in resident for value, times in traffic(profile, update).items() if times)
    ):
        nodes = [schedule.root, *_step_phase(schedule, profile, update)]
        return replace(schedule, root=series(*nodes), resident=where)
    streaming = Streaming.of(schedule, profile, machine, home=homes, update=update, accumulate=accumulate)
    stays = streaming.stays(resident)
    _check_room(streaming.computation, Occupancy(streaming.base, stays).nbytes.tolist(), budget)
    return streaming.issued(stays, None)


def _step_phase(schedule: Schedule, profile: Profile, update: UpdateMode) -> Iterator[Node]:
    """The step phase when everything is on the device."""
    if update is None or not any(isinstance(node, Backward) for node in distinct_nodes(schedule.root)):
        return
    used = uses_of_blocks(profile)
    trained = [index for index, block in enumerate(profile.blocks) if block.gradient_nbytes and used[index]]
    yield Phase(PhaseKind.STEP)
    yield from (action for index in trained for action in updates_of(index, profile))
    # Users see gradients as .grad until the step has ended.
    yield from (Free(Value(Kind.GRADIENT, index), Tier.DEVICE) for index in trained)


def _check_room(computation: Sequence[Action], needed: Iterable[int], budget: Budget | None) -> None:
    allowed = None if budget is None else budget.device_nbytes
    most, position = max((nbytes, -position) for position, nbytes in enumerate(needed))
    if allowed is None or most <= allowed:
        return
    action = computation[-position]
    stage = action.stage if isinstance(action, Record | Backward) else None
    stage = action.start if isinstance(action, Forward) else stage
    raise BudgetError(
        f"{action} needs {format_nbytes(most)} on the device with its parameters there, the budget is "
        f"{format_nbytes(allowed)}; allow {most} bytes, or keep less of the tape or fewer values resident",
        least_nbytes=most,
        stage=stage,
    )
