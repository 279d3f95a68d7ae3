"""Copies that hide behind computation: what does not fit the device leaves it between two uses (`joint`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Profile
from tapestream.ir import (
    Action,
    Backward,
    Free,
    Keep,
    Kind,
    Offload,
    Prefetch,
    Record,
    Restore,
    Schedule,
    Tier,
    Value,
    Wait,
)
from tapestream.simulate.judge import Judge

DEVICE = Tier.DEVICE
Bytes: TypeAlias = NDArray[np.int64]
Order: TypeAlias = Literal["furthest", "earliest", "largest", "closest"]
ORDERS: tuple[Order, ...] = ("furthest", "earliest", "largest", "closest")
"""Which value makes room: the one used again last, the one unused longest, the largest, the smallest that suffices."""


class Gap(NamedTuple):
    """A value of ``nbytes`` is not used by the actions strictly between ``start`` and ``stop``."""

    value: Value
    nbytes: int
    start: int
    stop: int

    @property
    def made(self) -> int:
        """The action behind which a copy out may be issued: a state is kept before ``start`` reads it."""
        return self.start - (self.value.kind is Kind.STATE)


class Choice(NamedTuple):
    """Gaps, by number, whose value stays on the device, and gaps that make room before any other; gaps whose value is
    away from an action on, needed or not; whether copies out are issued in the order in which their room is needed, and
    not in that in which values are unused."""

    stay: frozenset[int] = frozenset()
    go: frozenset[int] = frozenset()
    away: frozenset[tuple[int, int]] = frozenset()
    as_needed: bool = False

    def changed(self, gap: int) -> "Iterator[Choice]":
        """The other choices for one gap."""
        stay, go = self.stay - {gap}, self.go - {gap}
        for stays, goes in ((stay, go), (stay | {gap}, go), (stay, go | {gap})):
            choice = self._replace(stay=stays, go=goes)
            if choice != self:
                yield choice


def without_copies(actions: Iterable[Action]) -> list[Action]:
    """The same computation with nothing moved: a state that came back later stays instead."""
    plain = [a for a in actions if not isinstance(a, Offload | Prefetch | Wait)]
    plain = [a for a in plain if not isinstance(a, Free) or (a.tier is DEVICE and a.value.kind is Kind.STATE)]
    wanted: set[int] = set()  # states restored later, not kept anew before that
    out: list[Action] = []
    for action in reversed(plain):
        match action:
            case Restore(stage):
                wanted.add(stage)
            case Keep(stage):
                wanted.discard(stage)
            case Free(value) if value.index in wanted:
                continue
        out.append(action)
    return out[::-1]


@dataclass(slots=True)
class Computation:
    """A schedule's actions with nothing moved, the device bytes at the peak of each, when values are unused, and the
    seconds of all."""

    actions: list[Action]
    nbytes: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, actions: Sequence[Action], profile: Profile, moving: Profile) -> "Computation":
        """By the judge's rules; ``moving`` says how many bytes of each stage's saved tensors can be moved."""
        found = cls(list(actions))
        judge = Judge(Schedule.of(found.actions, len(profile)), profile, None)
        memory, holds = judge.memory, judge.states.holds
        since: dict[Value, int] = {}
        for position, action in enumerate(found.actions):
            memory.peak[DEVICE] = memory.nbytes[DEVICE]
            judge.obey(action)
            memory.touch(DEVICE)
            found.nbytes.append(memory.peak[DEVICE])
            match action:
                case Record(stage):
                    since[Value(Kind.SAVED, stage)] = position
                case Keep(stage):
                    since[Value(Kind.STATE, stage)] = position + 1  # the next action leaves it
                case Restore(stage):
                    value = Value(Kind.STATE, stage)
                    found._close(value, profile.full_state_nbytes(stage), since.pop(value), position)
                    since[value] = position + 1
                case Backward(stage):
                    value = Value(Kind.SAVED, stage)
                    found._close(value, moving.stages[stage].saved_nbytes, since.pop(value), position)
                case Free(value):
                    since.pop(value, None)
            for value in [v for v, at in since.items() if at == position and v.kind is Kind.STATE]:
                if holds.get(value.index, 0) > 1:  # the tape holds it too, so its bytes would not go
                    since[value] = len(found.actions)
        found.seconds = judge.clock.now
        return found

    def _close(self, value: Value, nbytes: int, start: int, stop: int) -> None:
        if nbytes and stop - start > 1:
            self.gaps.append(Gap(value, nbytes, start, stop))

    def within(
        self, limit: int | None, tier: Tier, order: Order = "furthest", choice: "Choice | None" = None
    ) -> list[Action] | None:
        """The computation within ``limit`` device bytes, values going to ``tier`` and back; None where that fails.

        Room is made where an action lacks it, by a value that is away until its next use. Copies out start as soon as
        the value is there and are waited for when their room is needed; copies in start, in order of need, as early as
        there is room for all the time until then. ``choice``: exceptions to the order. Not optimal.
        """
        if limit is None or max(self.nbytes) <= limit:
            return self.actions
        slack = limit - np.array(self.nbytes, dtype=np.int64)
        choice = choice or Choice()
        leaves = self._leaving(slack, order, choice)
        return None if leaves is None else list(self._moved(leaves, slack, tier, choice.as_needed))

    def _leaving(self, slack: Bytes, order: Order, choice: Choice) -> dict[int, int] | None:
        """The gaps to use, by number, and the action that first needs the room; ``slack`` gets what they give."""
        gaps = self.gaps
        ranks: list[tuple[bool, bool, int]] = []
        leaves = dict(choice.away)
        for gone, position in choice.away:
            slack[position : gaps[gone].stop] += gaps[gone].nbytes
        settled = choice.stay | leaves.keys()
        begin = sorted((n for n in range(len(gaps)) if n not in settled), key=lambda n: -gaps[n].start)
        opened: list[int] = []
        for position in np.flatnonzero(slack < 0).tolist():
            while begin and gaps[begin[-1]].start < position:
                opened.append(begin.pop())
            opened = [n for n in opened if gaps[n].stop > position]
            while slack[position] < 0:
                if not opened:
                    return None
                if not ranks or order == "closest":
                    lack = -int(slack[position])
                    ranks = [(n in choice.go, *_rank(gap, order, lack)) for n, gap in enumerate(gaps)]
                gone = max(opened, key=ranks.__getitem__)
                opened.remove(gone)
                leaves[gone] = position
                slack[position : gaps[gone].stop] += gaps[gone].nbytes
        return leaves

    def _moved(self, leaves: dict[int, int], slack: Bytes, tier: Tier, as_needed: bool) -> Iterator[Action]:
        """The actions with the copies of ``leaves``."""
        before: dict[int, list[Action]] = {}  # actions put before that position
        after: dict[int, list[Action]] = {}
        by_stop = sorted((self.gaps[n].stop, n) for n in leaves)
        last = {self.gaps[n].value: n for _, n in by_stop}
        below: set[Value] = set()
        issued = 0
        leaving = [(self.gaps[n].made, position, n) for n, position in leaves.items()]
        for start, position, n in sorted(leaving, key=lambda gone: (gone[1], gone[0]) if as_needed else gone[:2]):
            value, out = self.gaps[n].value, list[Action]()
            if value not in below:  # else its copy there is still good
                start = issued = max(start, issued) if as_needed else start
                after.setdefault(start, []).append(Offload(value, DEVICE, tier))
                out.append(Wait(value, tier))
                below.add(value)
            before.setdefault(position, []).extend((*out, Free(value, DEVICE)))
        for stop, n in by_stop:
            value, nbytes, first = self.gaps[n].value, self.gaps[n].nbytes, leaves[n] + 1
            tight = np.flatnonzero(slack[first:stop] < nbytes)
            back = first + (int(tight[-1]) + 1 if len(tight) else 0)
            slack[back:stop] -= nbytes
            before.setdefault(back, []).append(Prefetch(value, tier, DEVICE))
            gone = [Free(value, tier)] if last[value] == n else []
            before.setdefault(stop, []).extend((Wait(value, DEVICE), *gone))
        for position, action in enumerate(self.actions):
            yield from before.get(position, ())
            yield action
            yield from after.get(position, ())


def _rank(gap: Gap, order: Order, lack: int) -> tuple[bool, int]:
    """Who makes room where so many bytes lack: the highest."""
    match order:
        case "furthest":
            return True, gap.stop
        case "earliest":
            return True, -gap.start
        case "largest":
            return True, gap.nbytes
        case "closest":
            return (True, -gap.nbytes) if gap.nbytes >= lack else (False, gap.nbytes)
