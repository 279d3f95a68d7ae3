"""Revolve inside, a slower tier outside, copied while computing (Kukreja, Hueckelheim, Gorman 2018)."""

from collections.abc import Iterator
from math import ceil

from tapestream.costs import Budget, Machine, Profile, StageCost
from tapestream.ir import Schedule, Tier
from tapestream.planners._equal import equal_stages
from tapestream.planners._fit import positive
from tapestream.planners._intervals import framed, remote_states
from tapestream.planners._recurrences import counts, least_forwards
from tapestream.planners._segments import Segments
from tapestream.planners._tiers import Store, Two, first_within

NAME = "async_multistage"


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
    tier: Tier | str | None = None,
    interval: int | None = None,
) -> Schedule:
    """One state of every ``interval`` stages to ``tier`` and back behind computation, binomial checkpointing inside.

    The interval (ours) is the least that hides a copy: ceil(seconds of a write / of a forward), and the same for a read
    and a record with its backward; longer where ``tier`` has no room for so many states, or where fewer copies mean
    fewer seconds (short chains, steps shorter than what starting a copy takes). With interval I and s = ``slots`` the
    paper's forwards are n + sum over intervals of (P(I, s) + I): 2 + P(I, s) / I for each stage, whatever n is. Here
    the last interval is reversed straight from the first sweep, which saves its length, and the state before it stays
    on the device. DEVICE holds s slots, one buffer on its way out or in, and what runs; left out, s is the most that
    the budget holds (counted as s + 3 states, one record, two cotangents). For equal stages, the only ones taken. A
    number of nodes that does not grow with n, no table. Raises BudgetError when a tier is too small, InputError for
    other stages, no direct link and knobs out of range.
    """
    n = len(profile)
    cost = equal_stages(NAME, profile)
    allowed = Budget.of(budget)
    two = Two.of(NAME, profile, allowed, machine, slots, tier, spare=1)
    store = two.direct()
    if interval is not None:
        tried = [positive(NAME, "interval", interval, n)]
    else:
        tried = list(intervals(n, two.slots, cost, store))
    chosen = first_within(NAME, ((length, two.nbytes(remote_states(n, length))) for length in tried), allowed)
    segments = Segments(cost, two.slots)
    root = framed(n, chosen, store.tier, segments.kept(chosen), segments.last)
    return Schedule(root, n, planner=NAME)


def hiding(cost: StageCost, store: Store) -> int:
    """The least interval behind whose forwards a write hides, and a read behind its records and backwards."""
    back = cost.recorded_seconds + cost.backward_seconds
    out = _quotient(store.write_seconds - store.busy_writing_seconds, cost.forward_seconds)
    return max(1, out, _quotient(store.read_seconds - store.busy_reading_seconds, back))


def _quotient(copy: float, compute: float) -> int:
    if copy <= 0:
        return 1
    return ceil(min(copy / compute, 1e15)) if compute else 10**15


def intervals(n: int, slots: int, cost: StageCost, store: Store) -> Iterator[int]:
    """Those that hide copies, up to the whole chain: of fewest seconds first, a short one before a long one."""

    def key(length: int) -> tuple[float, int, int]:
        runs = forwards(n, length, slots)
        return runs * cost.forward_seconds + remote_states(n, length) * busy, runs, length

    busy = store.busy_writing_seconds + store.busy_reading_seconds
    least = hiding(cost, store)
    lengths = {min(n, least * factor) for factor in counts(max(1, -(-n // least)))}
    yield from sorted(lengths, key=key)


def forwards(n: int, interval: int, slots: int) -> int:
    """All forwards, recorded ones included, of ``n`` stages in intervals of ``interval``."""
    whole = -(-n // interval) - 1
    last = n - whole * interval
    again = whole * (interval + least_forwards(interval, slots)) if whole else 0
    return n + again + least_forwards(last, slots)
