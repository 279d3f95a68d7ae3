"""Remote and local restart checkpoints at equal distances (Bencheikh, Finkbeiner, Neftci 2024)."""

from collections.abc import Iterator
from typing import NamedTuple

from tapestream.costs import Budget, Machine, Profile, StageCost
from tapestream.ir import Forward, Keep, Node, Repeat, Restore, Schedule, Series, Shift, Tier
from tapestream.planners._equal import equal_stages
from tapestream.planners._fit import positive
from tapestream.planners._intervals import framed, remote_states
from tapestream.planners._recurrences import counts, freed, recorded, reversed_stages, turn
from tapestream.planners._tiers import DEVICE, Store, Two, device_nbytes, first_within

NAME = "double"


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    interval: int | None = None,
    segment: int | None = None,
    tier: Tier | str | None = None,
) -> Schedule:
    """A state of every ``interval`` stages in ``tier``, in the current interval one of every ``segment`` on the device.

    Each stage runs at most three times: in the first sweep, to lay the local restart checkpoints, to be recorded.
    Copies run behind computation (ours: as in `async_multistage`), so the device holds the local restart checkpoints,
    a buffer on its way, and the records of one segment. For recurrent and spiking networks, whose states are as
    large as what they save. Knobs left out: about n^(2/3) and the square root of the interval without a device budget;
    with one, the fastest pair of a fixed list that fits (forwards, and copies longer than what they hide behind; bytes
    counted with the states and cotangents around the stage that runs). Not optimal: `async_multistage` takes less
    memory, and any better local scheme fewer forwards. For equal stages, the only ones taken. A constant number of
    nodes. Raises BudgetError when nothing fits, InputError for other stages, no direct link and knobs out of range.
    """
    n, allowed = len(profile), Budget.of(budget)
    cost = equal_stages(NAME, profile)
    store = Two.of(NAME, profile, allowed, machine, 1, tier).direct()
    choices = _Choices(n, profile, cost, store)
    if interval is not None:
        interval = positive(NAME, "interval", interval, n)
    elif allowed.device_nbytes is None:
        interval = max(1, round(n ** (2 / 3)))
    if segment is not None:
        segment = positive(NAME, "segment", segment, n if interval is None else interval)
    elif allowed.device_nbytes is None and interval is not None:
        segment = max(1, round(interval**0.5))
    pairs = sorted(choices.pairs(interval, segment), key=lambda pair: (choices.seconds(pair), pair))
    chosen = first_within(NAME, ((pair, choices.nbytes(pair)) for pair in pairs), allowed)
    again = Series(_local(*chosen, turning=False))
    root = framed(n, chosen.interval, store.tier, again, lambda length: _local(length, chosen.segment, turning=True))
    return Schedule(root, n, planner=NAME)


class _Pair(NamedTuple):
    interval: int
    segment: int


class _Choices(NamedTuple):
    n: int
    profile: Profile
    cost: StageCost
    store: Store

    def pairs(self, interval: int | None, segment: int | None) -> Iterator[_Pair]:
        """All pairs of the fixed lists that agree with what is given."""
        for long in counts(self.n) if interval is None else (interval,):
            for short in counts(long) if segment is None else (min(segment, long),):
                yield _Pair(long, short)

    def seconds(self, pair: _Pair) -> float:
        """Forwards beyond the first, and what copies take longer than the computation that they run behind."""
        interval, segment = pair
        cost, whole = self.cost, -(-self.n // interval) - 1
        last = self.n - whole * interval
        laid = _laid(interval, segment) * cost.forward_seconds
        back = laid + interval * (cost.recorded_seconds + cost.backward_seconds)
        write = max(0.0, self.store.write_seconds - interval * cost.forward_seconds)
        read = max(0.0, self.store.read_seconds - back)
        swept = interval * cost.forward_seconds
        stalls = remote_states(self.n, interval) * (write + read)
        return whole * (swept + laid) + _laid(last, segment) * cost.forward_seconds + stalls

    def nbytes(self, pair: _Pair) -> dict[Tier, int]:
        """Bytes of both tiers."""
        states = -(-pair.interval // pair.segment) + 1
        remote = remote_states(self.n, pair.interval) * self.cost.output_nbytes
        return {DEVICE: device_nbytes(self.profile, states, pair.segment), self.store.tier: remote}


def _laid(length: int, segment: int) -> int:
    """Forwards that lay the local restart checkpoints of ``length`` stages."""
    return (length - 1) // segment * segment


def _local(length: int, segment: int, turning: bool) -> tuple[Node, ...]:
    """An interval reversed from its live first state, kept already unless the chain ends here (``turning``)."""
    start = _laid(length, segment)
    count = start // segment
    if not count:
        return tuple(turn(0, length)) if turning else (freed(0), recorded(0, length), reversed_stages(0, length))
    lay = Repeat(Series((Keep(segment), Forward(segment, 2 * segment))), count - 1, segment)
    end = turn(start, length) if turning else (recorded(start, length), reversed_stages(start, length))
    again = Series((Restore(0), freed(0), recorded(0, segment), reversed_stages(0, segment)))
    back = Repeat(Shift(again, start - segment), count, -segment)
    return (*([Keep(0)] if turning else []), Forward(0, segment), lay, *end, back)
