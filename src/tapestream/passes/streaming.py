"""A computation whose parameter blocks come and go: the stays that follow from what is resident."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import (
    Action,
    Forward,
    Kind,
    Offload,
    Prefetch,
    Record,
    Schedule,
    Tier,
    Value,
)
from tapestream.ir.homes import KINDS, HomeLike, HomeTiers, home_tiers
from tapestream.passes.divided import Divided
from tapestream.passes.host_updates import NONE_HOSTED, Hosted, is_on_host
from tapestream.passes.issue import issue
from tapestream.passes.memory import Footprint, block_values, compute_seconds, footprint, stage_nbytes
from tapestream.passes.residency import UpdateMode
from tapestream.passes.runs import Run, runs_of, with_updates
from tapestream.passes.stays import Stay, cut_forwards, living_on_host


@dataclass(frozen=True, slots=True)
class Streaming:
    """A computation, cut where blocks change and with its updates, before it is said which values are resident.

    ``routes``: of the values of each kind from their home to the device (of blocks that are divided among ranks, to
    SHARD there); ``from_disk``: of those that overflow. ``sizes``: between uses. ``seconds``: of all
    computation before each action, and at the end. ``forwards``: runs of stages, recorded ones included;
    ``passing_nbytes``: of states and saved tensors that cross links. ``hosted``: what is updated in HOST; ``in_host``:
    the positions of these updates, by block, part after part.
    """

    schedule: Schedule
    profile: Profile
    machine: Machine | None
    routes: Mapping[Kind, tuple[Tier, ...]]
    from_disk: tuple[Tier, ...]
    update: UpdateMode
    accumulate: bool
    computation: list[Action]
    base: Footprint
    runs: dict[Value, list[Run]]
    sizes: dict[Value, int]
    seconds: NDArray[np.float64]
    forwards: int
    passing_nbytes: int
    hosted: Hosted
    in_host: Mapping[int, list[int]]
    moving: dict[Value, tuple[Stay, ...]] = field(default_factory=dict, compare=False)  # as asked for so far

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        profile: Profile,
        machine: Machine | None,
        *,
        home: HomeLike,
        update: UpdateMode,
        accumulate: bool = False,
        hosted: Hosted = NONE_HOSTED,
    ) -> "Streaming":
        """Terms as in `stream_parameters`."""
        update = None if accumulate else update
        hosted = NONE_HOSTED if update is None else hosted
        stages = profile.stages
        blocks = [stage.block for stage in stages]
        cut = cut_forwards(schedule, lambda k: blocks[k] != blocks[k - 1])
        computation = with_updates([*cut], profile, update, hosted)
        base, runs = footprint(computation, profile), runs_of(computation, profile)
        sizes = dict(block_values(profile))
        seconds = np.cumsum([0.0, *(compute_seconds(action, profile) for action in computation)])
        homes = home_tiers(home)
        near = Tier.DEVICE if profile.shards == 1 else Tier.SHARD
        routes = {kind: _route(machine, homes[kind], near) for kind in KINDS}
        below: tuple[Tier, ...] = ()
        if homes.overflowing:
            with suppress(InputError):  # a machine without a disk: nothing can overflow
                below = _route(machine, Tier.DISK, near)
        forwards = sum(map(_forwards, computation))
        copies = (action.value for action in computation if isinstance(action, Offload | Prefetch))
        passing = sum(stage_nbytes(value, profile) for value in copies)
        in_host: dict[int, list[int]] = {}
        for position, action in enumerate(computation):
            if is_on_host(action):
                in_host.setdefault(action.block, []).append(position)
        return cls(
            schedule, profile, machine, routes, below, update, accumulate, computation, base, runs, sizes, seconds,
            forwards, passing, hosted, in_host,
        )  # fmt: skip

    def stays(self, resident: frozenset[Value]) -> list[Stay]:
        """When each value is on the device."""
        return [stay for value in self.sizes for stay in self.stays_of(value, resident=value in resident)]

    def timed(
        self,
        stays: Sequence[Stay],
        budget: Budget | None,
        *,
        across: bool = False,
        on_disk: frozenset[Value] = frozenset(),
        host_nbytes: int | None = None,
    ) -> tuple[Schedule, float]:
        """The schedule that does this, with copies as early as ``budget`` allows (None: just in time), and its seconds.

        ``across``: parameters may arrive for the step phase before it begins. ``on_disk``: values that live there,
        whatever their kind's home. Raises BudgetError where the host has to hold more than ``host_nbytes``.
        """
        where = self._lying(stays, on_disk)
        living = sum(self.sizes[value] for value in living_on_host(where, stays))
        living += self.updating_nbytes
        actions, seconds = issue(
            self.computation, stays, self.profile, self.base, self.machine,
            budget=budget, across=across, living_nbytes=living, host_nbytes=host_nbytes,
        )  # fmt: skip
        schedule = Schedule.of(actions, self.schedule.stages, resident=where, planner=self.schedule.planner)
        return schedule, seconds

    def issued(self, stays: Sequence[Stay], budget: Budget | None, *, across: bool = False) -> Schedule:
        """The schedule of `timed`, with nothing on the disk that is not at home there."""
        return self.timed(stays, budget, across=across)[0]

    def on_host(self, stays: Sequence[Stay]) -> frozenset[Value]:
        """The values that the host has a place for, with none on the disk."""
        return living_on_host(self._lying(stays, frozenset()), stays)

    def _lying(self, stays: Sequence[Stay], on_disk: frozenset[Value]) -> tuple[tuple[Value, Tier], ...]:
        there = frozenset(stay.value for stay in stays if stay.start == 0 and not stay.arrive)
        homes = {kind: route[0] for kind, route in self.routes.items()}
        return tuple(lying(self.sizes, homes, there, self.accumulate, on_disk, self.near, self.hosted.late))

    @property
    def updating_nbytes(self) -> int:
        """Of HOST, what an update there takes beside the block."""
        return max((self.profile.blocks[block].update_extra_nbytes for block in self.in_host), default=0)

    @property
    def near(self) -> Tier:
        """Where values lie on the device between uses: whole, or their shards."""
        return self.routes[Kind.PARAMETERS][-1]

    def overflowed(self, stays: Sequence[Stay], on_disk: frozenset[Value]) -> list[Stay]:
        """The same stays, with those values at home on the disk, and those there in HOST that updates need."""
        found = []
        for stay in stays:
            if stay.value in on_disk:
                free = tuple(Tier.DISK if tier is Tier.HOST else tier for tier in stay.free)
                way = (*self.from_disk, Tier.DEVICE) if stay.divided else self.from_disk
                stay = stay._replace(arrive=stay.arrive and way, leave=stay.leave and way[::-1], free=free)
            found.append(stay)
        for value in (value for value in self.sizes if self.in_host and value in on_disk):
            found += self._stays_in_host(value, Tier.DISK)
        return found

    def stays_of(self, value: Value, *, resident: bool) -> tuple[Stay, ...]:
        """The stays of one value."""
        if resident:
            return tuple(self._stays(value, resident=True))
        found = self.moving.get(value)
        if found is None:
            found = self.moving[value] = tuple(self._stays(value, resident=False))
        return found

    def _stays(self, value: Value, *, resident: bool) -> Iterator[Stay]:
        route, nbytes, end = self.routes[value.kind], self.sizes[value], len(self.computation) - 1
        if self.profile.shards > 1:
            yield from self._divided().stays(value, resident)
        elif value.kind is Kind.GRADIENT:
            yield from self._gradient_stays(value, resident)
        elif resident:
            yield Stay(value, nbytes, 0, end)
        else:
            yield from self._stays_in_host(value, route[0])
            for run in self.runs.get(value, ()):
                if run.updates:
                    yield Stay(value, nbytes, run.start, run.stop, route, leave=route[::-1])
                else:
                    yield Stay(value, nbytes, run.start, run.stop, route, free=(Tier.DEVICE,))

    def _gradient_stays(self, value: Value, resident: bool) -> Iterator[Stay]:
        """From the block's first backward to its last, and again for a step phase; see `stream_parameters`."""
        route, nbytes, end = self.routes[value.kind], self.sizes[value], len(self.computation) - 1
        runs = self.runs.get(value)
        if self.accumulate and resident:
            yield Stay(value, nbytes, 0, end)
            return
        if not runs:
            return
        first, last = runs[0].start, runs[-1].stop
        if self.update is None and resident:
            yield Stay(value, nbytes, first, end)
        elif self.update is None:
            yield Stay(value, nbytes, first, last, route if self.accumulate else (), leave=route[::-1])
        elif value.index in self.hosted.blocks:
            leave = route[: 0 if self._passes(value, route[0]) else None : -1]
            yield Stay(value, nbytes, first, last, leave=leave)
            yield from self._stays_in_host(value, route[0])
        elif self.update == "backward":
            yield Stay(value, nbytes, first, last, free=(Tier.DEVICE,))
        elif resident:  # users see it as .grad until the step has ended
            yield Stay(value, nbytes, first, end, free=(Tier.DEVICE,))
        else:
            yield Stay(value, nbytes, first, runs[-2].stop, leave=route[::-1])
            yield Stay(value, nbytes, runs[-1].start, last, route, free=(Tier.DEVICE, route[0]))

    def _passes(self, value: Value, home: Tier) -> bool:
        """Whether it is a gradient that comes to HOST for an update in the backward, and goes no further."""
        hosted = value.kind is Kind.GRADIENT and value.index in self.hosted.blocks
        return hosted and home is Tier.DISK and self.update == "backward"

    def _stays_in_host(self, value: Value, home: Tier) -> Iterator[Stay]:
        """While a block is updated there, of a value that lives on the disk."""
        if home is not Tier.DISK or value.kind is Kind.BUFFERS:
            return
        there = self.in_host.get(value.index, [])
        if value.kind is Kind.OPTIMIZER_STATE:
            there = there[value.part : value.part + 1]
        if there:
            way = (Tier.DISK, Tier.HOST)
            leave = () if value.kind is Kind.GRADIENT else way[::-1]
            nbytes, arrive = self.sizes[value], () if self._passes(value, home) else way
            yield Stay(value, nbytes, there[0], there[-1], arrive, leave, tier=Tier.HOST)

    def _divided(self) -> "Divided":
        return Divided(self.profile, self.routes, self.runs, self.update, self.accumulate, len(self.computation) - 1)


def _forwards(action: Action) -> int:
    """Stages that an action runs forward."""
    return action.stop - action.start if isinstance(action, Forward) else int(isinstance(action, Record))


def lying(
    sizes: dict[Value, int],
    homes: Mapping[Kind, Tier] | HomeTiers,
    resident: frozenset[Value],
    accumulate: bool,
    on_disk: frozenset[Value] = frozenset(),
    near: Tier = Tier.DEVICE,
    late: frozenset[int] = frozenset(),
) -> Iterator[tuple[Value, Tier]]:
    """Where each value lies when the step starts and when it ends; ``near``: on the device, whole or a shard;
    ``late``: blocks that are updated in the next step's forward."""
    for value in sizes:
        if accumulate or value.kind is not Kind.GRADIENT or value.index in late:
            home = Tier.DISK if value in on_disk else homes[value.kind]
            yield value, near if value in resident or home is Tier.DEVICE else home


def _route(machine: Machine | None, home: Tier, near: Tier) -> tuple[Tier, ...]:
    """The way from ``home`` to the device, where it ends in ``near``, every link of it looked up in both directions;
    without a machine the direct one."""
    if machine is None:
        return (home, near) if home is not Tier.DEVICE or near is Tier.DEVICE else (near,)
    if near is Tier.SHARD:
        machine.link(near, Tier.DEVICE)
    route = (*machine.route(home)[:-1], near)
    for nearer, far in zip(route[1:], route, strict=False):
        machine.link(far, nearer)
        machine.link(nearer, far)
    return route
