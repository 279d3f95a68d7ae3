"""Two levels, the slower one without a limit (Aupy, Herrmann, Hovland, Robert 2016, "Disk-Revolve")."""

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.ir import Forward, Node, Phase, PhaseKind, Schedule, Series, Shift, Tier
from tapestream.planners._equal import equal_stages
from tapestream.planners._segments import Segments
from tapestream.planners._tiers import Two
from tapestream.planners.classic._reread import Reread, swept_lengths

NAME = "disk_revolve"
_LONGEST = 20_000


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
    tier: Tier | str | None = None,
) -> Schedule:
    """Least seconds with ``slots`` restart checkpoints on the device and as many as wanted in ``tier``.

    Copies are waited for (no overlap). With f = seconds of a forward, w, r = of a write and a read, z(m) = of binomial
    checkpointing on m stages: one(m) = min(z(m), min_j j f + z(m-j) + r + one(j)), the first state being in ``tier``;
    all(m) = min(z(m), min_j w + j f + all(m-j) + r + one(j)). Left out, ``slots`` is the most that the device budget
    holds (counted as slots + 2 states, one record, two cotangents), ``tier`` the fastest linked to the device. Optimal
    for equal stages, the only ones taken. O(n^2). Raises BudgetError when a tier is too small (`h_revolve` limits
    both), InputError for other stages and for more than 20,000 of them: `periodic_disk_revolve` needs no table.
    """
    n = len(profile)
    cost = equal_stages(NAME, profile)
    if n > _LONGEST:
        raise InputError(f"{NAME}: {n} stages are more than {_LONGEST}; use planner 'periodic_disk_revolve'")
    two = Two.of(NAME, profile, Budget.of(budget), machine, slots, tier)
    reread = Reread.of(Segments(cost, two.slots), two.store, n)
    lengths = swept_lengths(n, reread)
    two.check(len(lengths) - 1)
    return Schedule(_tree(n, lengths, reread), n, planner=NAME)


def _tree(n: int, lengths: list[int], reread: Reread) -> Node:
    segments, store = reread.segments, reread.store
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = []
    shared = {length: reread.reversed(length) for length in set(lengths[:-1])}
    start = 0
    for length in lengths[:-1]:
        sweep += (*store.write(start), Forward(start, start + length))
        back.append(Shift(shared[length], start))
        start += length
    return Series((*sweep, Shift(Series(segments.last(n - start)), start), *reversed(back)))
