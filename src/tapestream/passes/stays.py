"""Stays: when each value of a parameter block is on the device, how it comes and how it goes.

`stream_parameters` decides the stays, `read_stays` recovers them from a schedule, and `tapestream.passes.issue` turns
computation and stays into a schedule again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tapestream.costs import Profile
from tapestream.costs.profile import SUMMED_AT_ONCE
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Kind,
    Offload,
    Prefetch,
    Record,
    Schedule,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.passes.memory import Footprint, Nbytes, block_values


class Stay(NamedTuple):
    """One uninterrupted presence of a value on the device.

    ``start`` and ``stop``: positions of the first and last action of the computation that it is there for.
    ``arrive``: the tiers it passes on its way in (empty: there from the beginning, or made by the action at
    ``start``). ``leave``: the tiers it passes on its way out, written back; ``free``: the tiers where it is
    dropped instead. Of a block that is divided among ranks: ``shard``: bytes of a shard; ``tier``: whether all of it is
    there or a shard; ``due``: the action before which it must have left for the tier where it goes. ``tier`` HOST: the
    presence is there, for an update of what lives on the disk.
    """

    value: Value
    nbytes: int
    start: int
    stop: int
    arrive: tuple[Tier, ...] = ()
    leave: tuple[Tier, ...] = ()
    free: tuple[Tier, ...] = ()
    shard: int = 0
    tier: Tier = Tier.DEVICE
    due: int | None = None

    @property
    def divided(self) -> bool:
        """Whether all of it is there, of a block that is divided among ranks."""
        return self.shard > 0 and self.tier is Tier.DEVICE

    def nbytes_in(self, tier: Tier) -> int:
        """Bytes of its copy in a tier that it passes."""
        if not self.shard:  # as nearly all
            return self.nbytes
        return self.shard if self.divided and tier is not Tier.DEVICE else self.nbytes

    def moved_nbytes(self, source: Tier, target: Tier) -> int:
        """What a copy between two of those moves: between a shard and the whole, the parts of other ranks."""
        if not self.shard or not self.divided:
            return self.nbytes
        return self.nbytes - self.shard if source.memory is target.memory else self.nbytes_in(max(source, target))

    def copies(self) -> Iterator[tuple[tuple[Tier, Tier], int]]:
        """The ends of each copy that it takes, in and out, and the bytes that it moves."""
        for lane in (*pairwise(self.arrive), *pairwise(self.leave)):
            yield lane, self.moved_nbytes(*lane)

    @property
    def moving_nbytes(self) -> int:
        """Bytes that all of those move."""
        if self.divided:
            return sum(nbytes for _, nbytes in self.copies())
        return self.nbytes * (max(len(self.arrive) - 1, 0) + max(len(self.leave) - 1, 0))

    @property
    def before_nbytes(self) -> int:
        """Bytes that lie beside it when it has arrived: the shard that it came by."""
        return self.shard if self.divided and Tier.SHARD in self.arrive[1:] else 0

    @property
    def after_nbytes(self) -> int:
        """Bytes that lie beside it when it leaves: its sum over ranks, and what comes of it from other ranks."""
        if not self.divided or not self.leave:
            return 0
        return min(self.nbytes, SUMMED_AT_ONCE) + (self.shard if len(self.leave) > 2 else 0)

    @property
    def made(self) -> bool:
        """True when the action at ``start`` makes the value."""
        return not self.arrive and self.start > 0


_FEW = 4  # stays: adding them one by one is faster than at once


class Occupancy:
    """Device bytes right before and during each action when every value comes just in time and goes at once."""

    __slots__ = ("before", "during")

    def __init__(self, base: Footprint, stays: Iterable[Stay] = ()) -> None:
        self.before, self.during = base.before.copy(), base.during.copy()
        self.add(stays)

    def add(self, stays: Iterable[Stay], sign: int = 1) -> None:
        """Count some stays more (``sign`` -1: fewer)."""
        stays = tuple(stay for stay in stays if stay.tier is not Tier.HOST)
        for stay in stays:
            if stay.shard and stay.divided:
                self.before[stay.start] += sign * stay.before_nbytes
                self.during[stay.stop] += sign * stay.after_nbytes
        rows = [(stay.start, stay.stop + 1, stay.made, sign * stay.nbytes) for stay in stays]
        if len(rows) <= _FEW:
            for start, end, made, nbytes in rows:
                self.before[start + made : end] += nbytes
                self.during[start:end] += nbytes
            return
        starts, ends, made_there, sizes = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
        for held, first in ((self.before, starts + made_there), (self.during, starts)):
            changes = np.zeros(len(held) + 1, dtype=np.int64)
            np.add.at(changes, first, sizes)
            np.subtract.at(changes, ends, sizes)
            held += np.cumsum(changes[:-1])

    @property
    def nbytes(self) -> Nbytes:
        """The most around each action."""
        found: Nbytes = np.maximum(self.before, self.during)
        return found


def cut_forwards(schedule: Schedule, border: Callable[[int], bool]) -> Iterator[Action]:
    """The actions, every Forward cut before the stages that ``border`` names."""
    for action in schedule:
        if not isinstance(action, Forward):
            yield action
            continue
        start = action.start
        for k in range(action.start + 1, action.stop):
            if border(k):
                yield Forward(start, k)
                start = k
        yield Forward(start, action.stop)


def blocks_of(action: Action, profile: Profile) -> frozenset[int]:
    """The parameter blocks that ``action`` needs."""
    match action:
        case Forward(start, stop):
            found = {profile.stages[k].block for k in range(start, stop)}
            return frozenset(block for block in found if block is not None)
        case Record(stage) | Backward(stage):
            block = profile.stages[stage].block
            return frozenset(() if block is None else (block,))
        case Update(block, _, Tier.DEVICE):
            return frozenset((block,))
        case _:
            return frozenset()


def needed_in(action: Action, profile: Profile) -> Tier:
    """Where ``action`` needs blocks: updates are of shards where blocks are divided among ranks."""
    return Tier.SHARD if profile.shards > 1 and isinstance(action, Update) else Tier.DEVICE


def needs(action: Action, profile: Profile) -> Iterator[Value]:
    """The block values with bytes that must be on the device during ``action``, those that it makes included."""
    unread = isinstance(action, Backward) and not profile.stages[action.stage].reads_parameters
    for index in blocks_of(action, profile):
        block = profile.blocks[index]
        if block.parameters_nbytes and not unread:
            yield Value(Kind.PARAMETERS, index)
        if isinstance(action, Update):
            if block.parts[action.part]:
                yield Value(Kind.OPTIMIZER_STATE, index, action.part)
        elif block.buffers_nbytes and not unread:
            yield Value(Kind.BUFFERS, index)
        if block.gradient_nbytes and isinstance(action, Backward | Update):
            yield Value(Kind.GRADIENT, index)


def read_stays(schedule: Schedule, profile: Profile) -> tuple[list[Action], list[Stay]]:
    """The computation of ``schedule`` without copies of parameter blocks, and the stays that those copies amount to."""
    reader = _Reader(schedule, profile)
    for action in schedule:
        reader.read(action)
    return reader.computation, reader.stays()


@dataclass(slots=True)
class _Draft:
    value: Value
    start: int | None
    stop: int | None = None
    arrive: tuple[Tier, ...] = ()
    leave: tuple[Tier, ...] = ()
    free: tuple[Tier, ...] = ()
    ended: bool = False
    tier: Tier = Tier.DEVICE


@dataclass(slots=True)
class _Reader:
    schedule: Schedule
    profile: Profile
    computation: list[Action] = field(default_factory=list)
    drafts: list[_Draft] = field(default_factory=list)
    latest: dict[Value, _Draft] = field(default_factory=dict)
    coming: dict[Value, tuple[Tier, ...]] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)  # on the host

    def __post_init__(self) -> None:
        for value, tier in self.schedule.resident:
            if tier is Tier.DEVICE:
                self._open(_Draft(value, 0))

    def read(self, action: Action) -> None:
        match action:
            case Prefetch(value, source, target) if not value.kind.by_stage:
                path = (*self.coming.pop(value, (source,)), target)
                if target is Tier.DEVICE:
                    self._open(_Draft(value, None, arrive=path))
                else:
                    self.coming[value] = path
            case Offload(value, source, target) if not value.kind.by_stage:
                draft = self.latest[value]
                draft.leave = (*(draft.leave or (source,)), target)
                draft.ended = draft.ended or draft.tier is Tier.HOST
            case Free(value, tier) if not value.kind.by_stage:
                if value.kind is Kind.GRADIENT and tier >= Tier.HOST and value.index in self.updated:
                    return  # follows from the update there
                self._free(self.latest[value], tier)
            case Wait(value) if not value.kind.by_stage:
                pass
            case _:
                for value in needs(action, self.profile):
                    self._use(value)
                if isinstance(action, Update) and action.tier is Tier.HOST:
                    self.updated.add(action.block)
                    self._bring_to_host(action)
                self.computation.append(action)

    def _bring_to_host(self, action: Update) -> None:
        """What has come to the host and goes no further is there for an update."""
        position = len(self.computation)
        for value in [value for value in self.coming if value.index == action.block]:
            if value.kind is not Kind.OPTIMIZER_STATE or value.part == action.part:
                self._open(_Draft(value, position, position, self.coming.pop(value), tier=Tier.HOST))

    def _open(self, draft: _Draft) -> None:
        self.drafts.append(draft)
        self.latest[draft.value] = draft

    def _use(self, value: Value) -> None:
        position = len(self.computation)
        draft = self.latest.get(value)
        if draft is None or draft.ended:
            draft = _Draft(value, position)
            self._open(draft)
        draft.start = position if draft.start is None else draft.start
        draft.stop = position

    def _free(self, draft: _Draft, tier: Tier) -> None:
        if tier is Tier.DEVICE:
            draft.ended = True
        if tier not in draft.leave and tier not in draft.arrive[1:-1]:
            draft.free = (*draft.free, tier)

    def stays(self) -> list[Stay]:
        """The stays in order of arrival; a value that came and went unused made none."""
        sizes = dict(block_values(self.profile))
        end = len(self.computation) - 1
        found = []
        for draft in self.drafts:
            stop = draft.stop if draft.ended or draft.tier is Tier.HOST else end
            if draft.start is None or stop is None:
                continue
            nbytes = sizes.get(draft.value, 0)
            found.append(
                Stay(draft.value, nbytes, draft.start, stop, draft.arrive, draft.leave, draft.free, tier=draft.tier)
            )
        return sorted(found, key=lambda stay: stay.start)


def living_on_host(resident: Iterable[tuple[Value, Tier]], stays: Iterable[Stay]) -> frozenset[Value]:
    """Values that have a place there, where they lie when a step begins (``resident``) or are sent home to."""
    there = {value for value, tier in resident if tier is Tier.HOST}
    sent, passing = set[Value](), set[Value]()
    for stay in stays:
        if stay.tier is Tier.HOST:
            passing.add(stay.value)
        elif stay.leave and stay.leave[-1] is Tier.HOST:
            sent.add(stay.value)
    return frozenset(there | (sent - passing))


def successors(stays: Sequence[Stay]) -> list[tuple[int, int]]:
    """Pairs of indices of successive stays of one value: of all of it, or of a shard."""
    by_value: defaultdict[tuple[Value, Tier], list[int]] = defaultdict(list)
    for index, stay in enumerate(stays):
        by_value[stay.value, stay.tier].append(index)
    return [pair for indices in by_value.values() for pair in pairwise(indices)]
