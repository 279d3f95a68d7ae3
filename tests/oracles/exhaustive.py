"""Shortest paths over machine states: the truth about chains of few stages, for planners of recomputation.

Written from the rules of the instruction set alone. Schedules searched are the memory-persistent ones: forwards start
at a kept state, a kept state stays until its stage is recorded, a record until its backward, and the turn and each
backward come before anything else as soon as they can.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from tapestream.costs import Profile


class _Machine(NamedTuple):
    live: int  # -1: none
    running: bool  # the live state was reached by Forward, so going on needs no kept state
    kept: frozenset[int]
    taped: frozenset[int]
    cotangent: int  # -1 before the turn


def least_seconds(profile: Profile, budget: int) -> float | None:
    """Makespan of the fastest memory-persistent schedule within ``budget`` bytes, None when there is none."""
    n = len(profile)
    start = _Machine(0, False, frozenset(), frozenset(), -1)
    order = count()
    queue = [(0.0, next(order), start)]
    done: set[_Machine] = set()
    while queue:
        seconds, _, machine = heappop(queue)
        if machine in done:
            continue
        done.add(machine)
        if machine.cotangent == 0 and not machine.kept:
            return seconds + profile.turn_seconds
        for cost, peak, after in _moves(profile, n, machine):
            if peak <= budget and after not in done:
                heappush(queue, (seconds + cost, next(order), after))
    return None


def _held(profile: Profile, m: _Machine) -> int:
    states = set(m.kept)
    if m.live >= 0:
        states.add(m.live)
    for k in m.taped:
        stage = profile.stages[k]
        states |= {k} if stage.reads_input else set()
        states |= {k + 1} if stage.reads_output else set()
    nbytes = profile.outside_nbytes + sum(profile.state_nbytes(k) for k in states)
    nbytes += sum(c.nbytes for c in profile.carried if any(c.first <= k <= c.last for k in states))
    return (
        nbytes
        + sum(profile.stages[k].saved_nbytes for k in m.taped)
        + (profile.cotangent_nbytes(m.cotangent) if m.cotangent >= 0 else 0)
        + sum(cost.gradient_nbytes for cost in profile.stages[m.cotangent :] if m.cotangent >= 0)
    )


def _moves(profile: Profile, n: int, m: _Machine) -> "Iterator[tuple[float, int, _Machine]]":
    """(seconds, peak bytes, machine afterwards) of every action that may come next."""
    for free in m.kept:
        if free in m.taped or 0 <= m.cotangent <= free:
            yield 0.0, 0, m._replace(kept=m.kept - {free})
    back = m.cotangent - 1
    if back in m.taped:
        yield _backward(profile, m, back)
        return
    k = m.live
    if k == n and m.cotangent < 0:
        after = m._replace(cotangent=n)
        yield 0.0, _held(profile, after) + profile.turn_nbytes, after._replace(live=-1)
        return
    for kept in m.kept - {k}:
        yield 0.0, 0, m._replace(live=kept, running=False)
    if k >= 0 and k not in m.kept and k not in m.taped:
        yield 0.0, 0, m._replace(kept=m.kept | {k})
    if 0 <= k < n:
        cost = profile.stages[k]
        both = m._replace(kept=m.kept | {k, k + 1})  # the two states around the stage that runs
        if m.running or k in m.kept:
            peak = _held(profile, both) + cost.forward_extra_nbytes
            yield cost.forward_seconds, peak, m._replace(live=k + 1, running=True)
        if k not in m.taped:
            taped = m.taped | {k}
            peak = _held(profile, both._replace(taped=taped)) + cost.recorded_extra_nbytes
            yield cost.recorded_seconds, peak, m._replace(live=k + 1, running=False, taped=taped)


def _backward(profile: Profile, m: _Machine, back: int) -> tuple[float, int, _Machine]:
    stopped = m._replace(live=-1 if m.live == back + 1 else m.live)
    cost = profile.stages[back]
    peak = _held(profile, stopped) + profile.cotangent_nbytes(back) + cost.backward_extra_nbytes + cost.gradient_nbytes
    return cost.backward_seconds, peak, stopped._replace(taped=m.taped - {back}, cotangent=back)
