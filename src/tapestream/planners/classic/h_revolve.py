"""Levels of storage with a number of slots each (Herrmann & Pallez 2020, "H-Revolve")."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Budget, Machine, Profile, StageCost
from tapestream.errors import InputError
from tapestream.ir import Forward, Free, Kind, Node, Phase, PhaseKind, Schedule, Series, Tier, Value
from tapestream.planners._equal import equal_stages
from tapestream.planners._fit import positive
from tapestream.planners._segments import Segments
from tapestream.planners._tiers import Store, device_nbytes, first_within, most_slots, tier_of
from tapestream.planners.classic._grammar import Call, grow
from tapestream.planners.classic._reread import Reread, swept_lengths, table

NAME = "h_revolve"
_MOST_WORK = 1_000_000_000  # additions in the tables: some seconds
_LONGEST = 20_000


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: Sequence[int] | None = None,
    tiers: Sequence[Tier | str] | None = None,
) -> Schedule:
    """Least seconds with ``slots[k]`` restart checkpoints in the k-th tier, DEVICE being number 0.

    Copies are waited for (no overlap). In the paper's terms, l = n - 1, c_k slots, w_k and r_k seconds of a write and a
    read, f of a forward, the primed problem having its first state in tier k already:
    Opt_k'(l, m) = min(Opt_{k-1}(l, c_{k-1}), min_j j f + Opt_k(l-j, m-1) + r_k + Opt_k'(j-1, m)),
    Opt_k(l, m) = min(Opt_{k-1}(l, c_{k-1}), w_k + Opt_k'(l, m)). Tier 0 costs nothing to write and read, so Opt_0 is
    binomial checkpointing, in closed form. ``tiers``: the slower ones in order, left out those that ``machine``
    reaches; ``slots`` left out: what the budget holds (on the device counted as slots + 2 states, one record, two
    cotangents; in slower tiers at most 10^9 / n^2 of them, so that planning takes seconds). Optimal for equal stages,
    the only ones taken. O(n^2 c_k) for each slower tier. Raises BudgetError when a tier is too small, InputError for
    other stages, unknown tiers, slots below 1 and tables that would take more than some seconds.
    """
    n, allowed = len(profile), Budget.of(budget)
    cost = equal_stages(NAME, profile)
    if n > _LONGEST:
        raise InputError(f"{NAME}: {n} stages are more than {_LONGEST}; use planner 'periodic_disk_revolve'")
    stores = _stores(cost, machine, tiers, None if slots is None else len(slots) - 1)
    if slots is None:
        held = _held(profile, cost, stores, allowed)
    else:
        held = [positive(NAME, f"slots[{k}]", count, n) for k, count in enumerate(slots)]
    if n * n * sum(held[1:]) > _MOST_WORK * len(stores):
        raise InputError(
            f"{NAME}: {n} stages with slots={tuple(held)} take too long to plan; give fewer, or use 'disk_revolve'"
        )
    levels = [_Level(store, count) for store, count in zip(stores, held[1:], strict=True) if count]
    nbytes = {Tier.DEVICE: device_nbytes(profile, held[0])} | {level.store.tier: 0 for level in levels}
    for level in levels:
        nbytes[level.store.tier] += level.slots * cost.output_nbytes
        for between in level.store.route[1:-1]:
            nbytes[between] = nbytes.get(between, 0) + cost.output_nbytes
    first_within(NAME, [(None, nbytes)], allowed)
    solution = _Solution.of(n, Segments(cost, held[0]), levels)
    root = grow(_Part(len(levels), n - 1, levels[-1].slots if levels else 0, False, True), solution.expand)
    return Schedule(Series((Phase(PhaseKind.FORWARD), root)), n, planner=NAME)


def _stores(
    cost: StageCost, machine: Machine | None, tiers: Sequence[Tier | str] | None, count: int | None
) -> list[Store]:
    """The slower tiers, as many as ``count`` asks for."""
    if tiers is not None:
        below = [tier_of(NAME, tier) for tier in tiers]
    elif machine is None:
        below = [Tier.HOST, Tier.DISK][:count]
    else:
        hosts = [Tier.HOST] if (Tier.DEVICE, Tier.HOST) in machine.links else []
        disks = [Tier.DISK] if any(target is Tier.DISK for _, target in machine.links) else []
        below = [*hosts, *disks][:count]
    if below != sorted(set(below)) or count not in (None, len(below)):
        raise InputError(
            f"{NAME}: slots= is a count for the device, then one for each slower tier, fastest first; {count} were "
            f"given for the slower tiers {[tier.name for tier in below]}; give as many, or name the tiers (tiers=)"
        )
    return [Store.of(NAME, tier, cost.output_nbytes, machine) for tier in below]


def _held(profile: Profile, cost: StageCost, stores: list[Store], budget: Budget) -> list[int]:
    """Slots of each tier by its budget; in the first slower one no more than are of use, in all few enough to plan."""
    n, size = len(profile), cost.output_nbytes
    out = [most_slots(profile, budget)]
    most = max(1, min(n, _MOST_WORK // (n * n)))
    for store in stores:
        limit = budget.nbytes(store.tier)
        passing = sum(store.tier in other.route[1:-1] for other in stores)
        if store is stores[0]:
            of_use = len(swept_lengths(n, Reread.of(Segments(cost, out[0]), store, n))) - 1
        else:
            of_use = n
        out.append(min(most, of_use, n if limit is None or not size else max(0, limit // size - passing)))
    return out


class _Level(NamedTuple):
    store: Store
    slots: int


class _Part(NamedTuple):
    level: int
    l: int  # noqa: E741  # the paper's: one stage less than there are
    m: int
    stored: bool  # the primed problem
    turning: bool  # ends with the last stage of the chain


@dataclass(frozen=True, slots=True)
class _Solution:
    """By level (from 1), [slots, l]: ``cuts`` j of the primed problem, 0 for the level below; whether to ``write``."""

    segments: Segments
    levels: list[_Level]
    cuts: list[NDArray[np.int64]]
    write: list[NDArray[np.bool_]]

    @classmethod
    def of(cls, n: int, segments: Segments, levels: list[_Level]) -> "_Solution":
        lower = table(segments, n)
        cuts, write = [], []
        for store, slots in levels:
            plain = np.empty((slots + 1, n))
            plain[0] = lower
            primed = np.tile(lower, (slots, 1))
            cut = np.zeros((slots + 1, n), np.int64)
            ahead = segments.forward * np.arange(n) + store.read_seconds
            rows = np.arange(slots)
            for l in range(n):  # noqa: E741
                if l:
                    sums = ahead[1 : l + 1] + plain[:-1, l - 1 :: -1][:, :l] + primed[:, :l]
                    best = sums.argmin(1)
                    split = sums[rows, best]
                    cut[1:, l] = np.where(split < lower[l], best + 1, 0)
                    primed[:, l] = np.minimum(split, lower[l])
                plain[1:, l] = np.minimum(lower[l], store.write_seconds + primed[:, l])
            cuts.append(cut)
            write.append(plain < lower)
            lower = plain[slots]
        return cls(segments, levels, cuts, write)

    def expand(self, part: _Part) -> list[Node | Call[_Part]]:
        """One part taken apart."""
        level, l, m, stored, turning = part  # noqa: E741
        if not level:
            return [*self.segments.last(l + 1)] if turning else [self.segments.live(l + 1)]
        store = self.levels[level - 1].store
        below = _Part(level - 1, l, self.levels[level - 2].slots if level > 1 else 0, False, turning)
        if not stored:
            if not self.write[level - 1][m, l]:
                return [Call(below)]
            return [*store.write(0), Call(_Part(level, l, m, True, turning))]
        cut = int(self.cuts[level - 1][m, l])
        if not cut:
            return [Free(Value(Kind.STATE, 0), store.tier), Call(below)]
        right, left = _Part(level, l - cut, m - 1, False, turning), _Part(level, cut - 1, m, True, False)
        return [Forward(0, cut), Call(right, cut), *store.read(0, last=False), Call(left)]
