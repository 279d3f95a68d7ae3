"""Equal segments from a slower tier (Aupy & Herrmann 2017, "Periodicity in optimal hierarchical checkpointing")."""

from collections.abc import Iterable, Iterator
from itertools import count as numbers
from itertools import takewhile
from math import inf

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Forward, Node, Phase, PhaseKind, Repeat, Schedule, Series, Shift, Tier
from tapestream.planners._equal import equal_stages
from tapestream.planners._fit import positive
from tapestream.planners._recurrences import counts, least_forwards, reach
from tapestream.planners._segments import Segments
from tapestream.planners._tiers import Store, Two
from tapestream.planners.classic._reread import Reread, table

NAME = "periodic_disk_revolve"
_LONGEST_TABLE = 512
_TRIED = 6  # numbers of segments below the most


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    slots: int | None = None,
    tier: Tier | str | None = None,
    period: int | None = None,
) -> Schedule:
    """A state into ``tier`` every ``period`` stages, ``slots`` restart checkpoints on the device in between.

    Copies are waited for (no overlap). A segment costs w + m f + r + one(m) seconds: a write, the first sweep, a read
    and the reversal, see `disk_revolve`. The paper's period is the m of least seconds per stage; with one read for each
    segment that is some m = C(slots + t, t), since one(m) is then piecewise linear. Here, ``period`` left out, the
    least total wins among these m for all numbers of slots up to ``slots`` and all m up to 512 (with several reads of a
    segment), so that more slots are never slower. The last segment, which may be longer than the others, stays on the
    device. Not optimal, but close to `disk_revolve` on long chains. For equal stages, the only ones taken. Tree and
    table do not grow with n. The other knobs, budgets and errors are as for `disk_revolve`.
    """
    n = len(profile)
    cost = equal_stages(NAME, profile)
    two = Two.of(NAME, profile, Budget.of(budget), machine, slots, tier)
    segments = Segments(cost, two.slots)
    longest = min(n if period is None else positive(NAME, "period", period, n), _LONGEST_TABLE)
    reread = Reread.of(segments, two.store, longest)
    rests = table(segments, min(n, _LONGEST_TABLE * (_TRIED + 1))).tolist()  # seconds of what stays on the device
    lengths = {min(period, n)} if period else {*range(1, longest + 1), *_periods(n, segments, two.store)}
    _, count, length = min(  # of equally fast ones that with the fewest copies
        (_total(n, length, count, reread, rests), count, length) for length in lengths for count in _numbers(n, length)
    )
    two.check(count)
    return Schedule(_tree(n, length, count, reread), n, planner=NAME)


def _total(n: int, length: int, count: int, reread: Reread, rests: list[float]) -> float:
    """Seconds of ``count`` segments that are written, swept, read and reversed, and of the rest on the device."""
    store = reread.store
    sweep = length * reread.segments.forward
    each = store.write_seconds + sweep + store.read_seconds + reread.seconds(length)
    rest = n - count * length
    return count * each + (rests[rest - 1] if rest <= len(rests) else reread.segments.seconds(rest))


def _numbers(n: int, length: int) -> Iterable[int]:
    """How many segments may go to the slower tier: the rest may be several periods long."""
    most = (n - 1) // length
    return {0, *range(max(0, most - _TRIED), most + 1)}


def _periods(n: int, segments: Segments, store: Store) -> Iterator[int]:
    """The best m = C(s + t, t) below n for numbers s of slots up to those there are."""
    copies = store.write_seconds + store.read_seconds
    for slots in takewhile(lambda number: number <= segments.slots, counts(n)):
        best, least = 0, inf
        for t in numbers(1):
            m = reach(slots, t)
            seconds = (copies + segments.forward * (m + least_forwards(m, slots))) / m
            if m >= n or seconds >= least:
                break
            best, least = m, seconds
        if best:
            yield best


def _tree(n: int, length: int, count: int, reread: Reread) -> Node:
    start = count * length
    out = Series((*reread.store.write(0), Forward(0, length)))
    back: list[Node] = []
    if count:
        back.append(Repeat(Shift(reread.reversed(length), start - length), count, -length))
    last = Shift(Series(reread.segments.last(n - start)), start)
    return Series((Phase(PhaseKind.FORWARD), Repeat(out, count, length), last, *back))
