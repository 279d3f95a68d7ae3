"""Shortest paths over all schedules of few equal stages, bytes counted in slots: the truth for planners with slots.

Written from the rules of the instruction set alone. States may be kept on the device and copied to one slower tier and
back at any moment, dropped at any moment, forwards may start anywhere, stages may be recorded at any time.
"""

from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple


class Machine(NamedTuple):
    live: int  # -1: none
    fast: frozenset
    slow: frozenset
    taped: frozenset
    due: int  # the next backward, n before the turn


def least_seconds(n, slots, remote=0, *, forward=1, each=1, write=0, read=0, mixed=False):
    """``each``: seconds of a record with its backward. ``mixed``: slots hold records too; else one stage is recorded at
    most. The record that the next backward needs takes no slot."""
    order = count()
    queue = [(0, next(order), Machine(0, frozenset(), frozenset(), frozenset(), n))]
    done = set()
    while queue:
        seconds, _, m = heappop(queue)
        if m in done:
            continue
        done.add(m)
        if m.due == 0:
            return seconds
        for cost, after in moves(m, n, remote, forward, each, write, read, mixed):
            held = len(after.fast) + (len(after.taped - {after.due - 1}) if mixed else 0)
            if held <= slots and after not in done:
                heappush(queue, (seconds + cost, next(order), after))
    return None


def moves(m, n, remote, forward, each, write, read, mixed):
    if m.due - 1 in m.taped and (m.due < n or m.live == n):
        yield 0, m._replace(taped=m.taped - {m.due - 1}, due=m.due - 1, live=-1 if m.live == m.due else m.live)
        return
    for k in m.fast:
        yield 0, m._replace(fast=m.fast - {k})
        yield 0, m._replace(live=k)
    for k in m.slow:
        yield 0, m._replace(slow=m.slow - {k})
        yield read, m._replace(live=k)
    k = m.live
    if k < 0 or k >= m.due:
        return
    if k not in m.fast:
        yield 0, m._replace(fast=m.fast | {k})
    if k not in m.slow and len(m.slow) < remote:
        yield write, m._replace(slow=m.slow | {k})
    yield forward, m._replace(live=k + 1)
    if k not in m.taped and (mixed or k == m.due - 1):
        yield each, m._replace(live=k + 1, taped=m.taped | {k})
