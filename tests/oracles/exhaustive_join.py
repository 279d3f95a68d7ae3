"""Shortest paths over machine states: the truth about a few short branches that meet in one turn.

Written from the rules of the instruction set alone, as `exhaustive`. Memory-persistent schedules with one first sweep:
before the turn each branch runs forward once; forwards start at a kept state; a kept state stays until its stage is
recorded, a record until its backward. ``order``: "any" lets branches take turns at will, forward and backward; "free"
as well, but what was kept or recorded last is used up first, each backward as soon as it can come, and a state is kept
when its forward is about to run; "both" besides has each branch run forward to its end before the next one starts.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from tapestream.costs import Profile


class _Item(NamedTuple):
    index: int
    taped: bool  # the saved tensors of stage `index`; else a kept state


class _Machine(NamedTuple):
    live: tuple[int, ...]  # of each branch, -1: none
    running: tuple[bool, ...]  # reached by a forward, so going on needs no kept state
    items: tuple[_Item, ...]  # in order of making
    cotangents: tuple[int, ...]  # of each branch; empty before the turn

    def moved(self, i: int, to: int, running: bool) -> "_Machine":
        return self._replace(live=_put(self.live, i, to), running=_put(self.running, i, running))

    def has(self, index: int, taped: bool) -> bool:
        return (index, taped) in self.items


def least_seconds(profile: Profile, budget: int, order: str) -> float | None:
    """Makespan of the fastest such schedule within ``budget`` bytes, None when there is none."""
    search = _Search(profile, order)
    numbers = count()
    start = _Machine(search.starts, (False,) * len(search.starts), (), ())
    queue, done = [(0.0, next(numbers), start)], set()
    while queue:
        seconds, _, machine = heappop(queue)
        if order == "any":
            machine = machine._replace(items=tuple(sorted(machine.items)))
        if machine in done:
            continue
        done.add(machine)
        if machine.cotangents == search.starts and not machine.items:
            return seconds + profile.turn_seconds
        for cost, peak, after in search.moves(machine):
            if peak <= budget:
                heappush(queue, (seconds + cost, next(numbers), after))
    return None


class _Search:
    def __init__(self, profile: Profile, order: str) -> None:
        self.profile, self.order = profile, order
        self.starts = tuple(start for start, _ in profile.spans)
        self.stops = tuple(stop for _, stop in profile.spans)

    def held(self, m: _Machine, *more: int) -> int:
        profile = self.profile
        states = {k for k in m.live if k >= 0} | {item.index for item in m.items if not item.taped} | {*more}
        nbytes = profile.outside_nbytes
        for k, taped in m.items:
            if taped:
                cost = profile.stages[k]
                states |= ({k} if cost.reads_input else set()) | ({k + 1} if cost.reads_output else set())
                nbytes += cost.saved_nbytes
        nbytes += sum(profile.state_nbytes(k) for k in states)
        nbytes += sum(c.nbytes for c in profile.carried if any(c.first <= k <= c.last for k in states))
        for k, stop in zip(m.cotangents, self.stops, strict=False):
            nbytes += profile.cotangent_nbytes(k) + sum(cost.gradient_nbytes for cost in profile.stages[k:stop])
        return nbytes

    def moves(self, m: _Machine) -> Iterator[tuple[float, int, _Machine]]:
        """(seconds, peak bytes, machine afterwards) of every action that may come next."""
        for item in m.items:
            used = m.cotangents and m.cotangents[self.branch(item.index)] <= item.index
            if not item.taped and (m.has(item.index, True) or used):
                yield 0.0, 0, m._replace(items=tuple(other for other in m.items if other != item))
        for i, k in enumerate(m.cotangents):
            if m.has(k - 1, True) and (self.order == "any" or m.items[-1] == (k - 1, True)):
                yield self.backward(m, i, k - 1)
                if self.order != "any":
                    return
        if m.live == self.stops and not m.cotangents:
            after = m._replace(cotangents=self.stops)
            yield 0.0, self.held(after) + self.profile.turn_nbytes, after._replace(live=(-1,) * len(m.live))
            return
        if m.cotangents:
            for item in m.items if self.order == "any" else m.items[-1:]:
                if not item.taped:
                    alone = _put((-1,) * len(m.live), self.branch(item.index), item.index)
                    yield 0.0, 0, m._replace(live=alone, running=(False,) * len(m.live))
        for i, k in enumerate(m.live):
            if 0 <= k < self.stops[i]:
                yield from self.going(m, i, k)
                if self.order == "both" and not m.cotangents:
                    return

    def going(self, m: _Machine, i: int, k: int) -> Iterator[tuple[float, int, _Machine]]:
        cost = self.profile.stages[k]
        if not m.has(k, False) and not m.has(k, True):
            kept = m._replace(items=(*m.items, _Item(k, False)))
            if self.order == "any" or m.cotangents:
                yield 0.0, 0, kept
            else:
                peak = self.held(kept, k + 1) + cost.forward_extra_nbytes
                yield cost.forward_seconds, peak, kept.moved(i, k + 1, True)
        if m.running[i] or m.has(k, False):
            yield cost.forward_seconds, self.held(m, k + 1) + cost.forward_extra_nbytes, m.moved(i, k + 1, True)
        if not m.has(k, True):
            taped = m._replace(items=(*m.items, _Item(k, True)))
            peak = self.held(taped, k + 1) + cost.recorded_extra_nbytes
            yield cost.recorded_seconds, peak, taped.moved(i, k + 1, False)

    def backward(self, m: _Machine, i: int, k: int) -> tuple[float, int, _Machine]:
        cost = self.profile.stages[k]
        stopped = m.moved(i, -1, False) if m.live[i] == k + 1 else m
        peak = self.held(stopped) + self.profile.cotangent_nbytes(k) + cost.backward_extra_nbytes + cost.gradient_nbytes
        items = tuple(item for item in stopped.items if item != (k, True))
        after = stopped._replace(items=items, cotangents=_put(m.cotangents, i, k))
        return cost.backward_seconds, peak, after

    def branch(self, k: int) -> int:
        return max(i for i, start in enumerate(self.starts) if start <= k)


def _put(values: tuple, i: int, value: object) -> tuple:
    return (*values[:i], value, *values[i + 1 :])
