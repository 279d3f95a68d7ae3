"""Bytes that a schedule holds beside its parameter blocks, action by action.

Follows the rules of docs/ir.md for states, saved tensors and cotangents, and knows nothing of validity: the
judge alone decides that.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Profile
from tapestream.costs.profile import sharded
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    KeepInside,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Tier,
    Update,
    Value,
)

Nbytes = NDArray[np.int64]


_TURN = Phase(PhaseKind.BACKWARD)


class _Hold:
    """Bits (an IntFlag's operators are Python code, and these are used for every action)."""

    LIVE: Final = 1
    KEPT: Final = 2
    INPUT: Final = 4
    OUTPUT: Final = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes without parameter blocks: on the device right before and at the peak of each action; on the host."""

    before: Nbytes
    during: Nbytes
    host: Nbytes


def footprint(actions: Sequence[Action], profile: Profile) -> Footprint:
    """The bytes that ``actions`` hold in states, saved tensors, cotangents and transients; blocks excluded.

    Linear in stages run (times the number of carried storages).
    """
    walk = _Walk(profile)
    rows = [(walk.device, walk.run(action), walk.host) for action in actions]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Footprint(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def compute_seconds(action: Action, profile: Profile) -> float:
    """Seconds that ``action`` takes on the compute lane."""
    stages = profile.stages
    if isinstance(action, Forward):  # every action of every schedule that is tried is asked about
        if action.stop == action.start + 1:
            return stages[action.start].forward_seconds
        return sum(stages[k].forward_seconds for k in range(action.start, action.stop))
    if isinstance(action, Record):
        return stages[action.stage].recorded_seconds
    if isinstance(action, Backward):
        return stages[action.stage].backward_seconds
    if isinstance(action, Update) and action.tier is Tier.DEVICE:
        return profile.blocks[action.block].part_seconds(action.part)
    return profile.turn_seconds if isinstance(action, Phase) and action == _TURN else 0.0


def stage_nbytes(value: Value, profile: Profile) -> int:
    """Bytes of one copy of a state (carried storages included) or of saved tensors, 0 for other kinds."""
    if value.kind is Kind.STATE:
        return profile.full_state_nbytes(value.index)
    return profile.stages[value.index].saved_nbytes if value.kind is Kind.SAVED else 0


def stage_moves(value: Value, profile: Profile) -> tuple[int, int]:
    """Those bytes, and how many copies it takes to move them."""
    copies = profile.stages[value.index].saved_storages if value.kind is Kind.SAVED else 1
    return stage_nbytes(value, profile), copies


class _Walk:
    """The device and host bytes as a schedule runs."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.holds: dict[int, int] = {}
        self.carried: Counter[int] = Counter()
        self.live: int | None = None
        self.keeping: int | None = None
        self.inside: set[int] = set()
        self.host = 0
        self.device = profile.outside_nbytes
        self._go(0)

    def run(self, action: Action) -> int:
        """Run one action; returns the device bytes at its peak."""
        profile, peak = self.profile, self.device
        match action:
            case Forward(start, stop):
                if self.keeping is not None:
                    self.inside.add(self.keeping)
                    self.device += profile.stages[self.keeping].inside_nbytes
                    self.keeping = None
                for k in range(start, stop):
                    peak = max(peak if k > start else 0, self._step(k, profile.stages[k].forward_extra_nbytes))
            case Record(k):
                cost = profile.stages[k]
                self._drop_inside(k)
                self.device += cost.saved_nbytes
                if cost.reads_input:
                    self._hold(k, _Hold.INPUT)
                if cost.reads_output:
                    self._hold(k + 1, _Hold.OUTPUT)
                peak = self._step(k, profile.stages[k].recorded_extra_nbytes)
            case Backward(k):
                if self.live == k + 1:
                    self._go(None)
                self.device += profile.cotangent_nbytes(k) + profile.stages[k].gradient_nbytes
                peak = self.device + profile.stages[k].backward_extra_nbytes
                self.device -= profile.cotangent_nbytes(k + 1) + profile.stages[k].saved_nbytes
                self._drop(k, _Hold.INPUT)
                self._drop(k + 1, _Hold.OUTPUT)
            case Keep(k):
                self._hold(k, _Hold.KEPT)
            case KeepInside(k):
                self.keeping = k
            case Free(Value(Kind.INSIDE, k)):
                self._drop_inside(k)
            case Restore(k):
                self._go(k)
            case Phase(PhaseKind.BACKWARD):
                self.device += profile.cotangent_nbytes(len(profile))
                peak = self.device + profile.turn_nbytes
                self._go(None)
            case Phase(PhaseKind.STEP):
                self.device -= profile.cotangent_nbytes(0)
            case Update(block, _, Tier.DEVICE):
                peak = self.device + profile.blocks[block].update_extra_nbytes
            case Offload(value, _, target) | Prefetch(value, _, target):
                peak = self._copy(value, target, 1)
            case Free(value, tier):
                self._copy(value, tier, -1)
            case _:
                pass
        return peak

    def _drop_inside(self, k: int) -> None:
        if k in self.inside:
            self.inside.remove(k)
            self.device -= self.profile.stages[k].inside_nbytes

    def _step(self, k: int, extra: int) -> int:
        former = self.live
        self._hold(k + 1, _Hold.LIVE)
        peak = self.device + extra
        self.live = k + 1
        if former is not None:
            self._drop(former, _Hold.LIVE)
        return peak

    def _go(self, k: int | None) -> None:
        former, self.live = self.live, k
        if former == k:
            return
        if k is not None:
            self._hold(k, _Hold.LIVE)
        if former is not None:
            self._drop(former, _Hold.LIVE)

    def _copy(self, value: Value, tier: Tier, sign: int) -> int:
        if value.kind is Kind.STATE and tier is Tier.DEVICE:
            (self._hold if sign > 0 else self._drop)(value.index, _Hold.KEPT)
            return self.device
        nbytes = stage_nbytes(value, self.profile)
        if tier is Tier.DEVICE:
            self.device += sign * nbytes
        elif tier is Tier.HOST:
            self.host += sign * nbytes
        return self.device

    def _hold(self, k: int, hold: int) -> None:
        before = self.holds.get(k, 0)
        if not before:
            self.device += self.profile.state_nbytes(k) + self._carry(k, 1)
        self.holds[k] = before | hold

    def _drop(self, k: int, hold: int) -> None:
        before = self.holds.get(k, 0)
        if not before & hold:
            return
        if before != hold:
            self.holds[k] = before & ~hold
            return
        del self.holds[k]
        self.device -= self.profile.state_nbytes(k) + self._carry(k, -1)

    def _carry(self, k: int, sign: int) -> int:
        """Bytes of the carried storages that come or go as state k does."""
        nbytes = 0
        for number, storage in enumerate(self.profile.carried):
            if storage.first <= k <= storage.last:
                self.carried[number] += sign
                if self.carried[number] == (1 if sign > 0 else 0):
                    nbytes += storage.nbytes
        return nbytes


def block_values(profile: Profile) -> Iterable[tuple[Value, int]]:
    """Every value of every parameter block that has bytes, with those that it has between its uses: where blocks are
    divided among ranks, a shard's."""
    for index in profile.holding:
        block = profile.blocks[index]
        for kind, nbytes in (
            (Kind.PARAMETERS, block.parameters_nbytes),
            (Kind.BUFFERS, block.buffers_nbytes),
            (Kind.GRADIENT, block.gradient_nbytes),
        ):
            if nbytes > 0:
                yield Value(kind, index), sharded(nbytes, kind, Tier.SHARD, profile.shards)
        for part, nbytes in enumerate(block.parts):
            if nbytes > 0:
                yield Value(Kind.OPTIMIZER_STATE, index, part), nbytes


def updates_of(block: int, profile: Profile, tier: Tier = Tier.DEVICE) -> Iterable[Update]:
    """The updates of one block, part by part."""
    return (Update(block, part, tier) for part in range(len(profile.blocks[block].parts)))
