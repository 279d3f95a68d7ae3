"""Segments that end with a heavy stage, and the schedule that keeps, moves and recomputes them (`superneurons`)."""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tapestream.costs import Profile
from tapestream.ir import (
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Restore,
    Series,
    Tier,
    Value,
    Wait,
)
from tapestream.planners._least_peak import Sizes
from tapestream.planners._recurrences import freed, recorded, reversed_stages
from tapestream.planners._tiers import DEVICE


class Segment(NamedTuple):
    """Stages first .. again-1 are recomputed, again .. stop-1 recorded in the first sweep.

    ``once``: all recomputed stages are recorded together; otherwise each anew from the first state.
    """

    first: int
    again: int
    stop: int
    once: bool


def movable(profile: Profile, segments: Sequence[Segment]) -> list[int]:
    """Restart checkpoints whose bytes leave the device when they are freed there.

    Not one whose segment recomputes nothing, nor one that the tape of the stage before it holds, nor the last.
    """
    found = []
    for before, segment in zip((None, *segments[:-1]), segments[:-1], strict=False):
        taped = before is not None and before.stop > before.again and profile.stages[before.stop - 1].reads_output
        if segment.again > segment.first and not taped:
            found.append(segment.first)
    return found


def cut(n: int, heavy: list[int], taped: bool, mode: str, sizes: Sizes, most: int) -> list[Segment]:
    """Segments behind each heavy stage and to the next one, which is recorded in the first sweep where ``taped``.

    ``most``: l_peak, which the tape of a segment must not exceed to be recorded at once in mode "cost_aware".
    """
    ends = sorted({0, *(stage + 1 for stage in heavy), n})
    weighty = set(heavy)
    found = []
    for first, stop in pairwise(ends):
        again = stop - 1 if taped and stop - 1 in weighty else stop
        once = mode == "speed" or (mode == "cost_aware" and _tape(sizes, first, again) <= most)
        found.append(Segment(first, again, stop, once))
    last = found[-1]
    start = last.first if last.once else n - 1  # the end of the chain is turned round at once
    return [*found[:-1], last._replace(again=start)]


def _tape(sizes: Sizes, first: int, stop: int) -> int:
    """Bytes at the peak of recording and reversing stages first .. stop-1, their first state included."""
    inside = max(sizes.reached[first:stop], default=0) - sizes.tape[first]
    return sizes.states[first] + inside


def peak_of_one_backward(profile: Profile) -> int:
    """l_peak: what backward of one stage reads, both cotangents, saved tensors, transient bytes, at most."""
    return max(
        (profile.full_state_nbytes(k) if cost.reads_input else 0)
        + (profile.full_state_nbytes(k + 1) if cost.reads_output else 0)
        + profile.cotangent_nbytes(k) + profile.cotangent_nbytes(k + 1)
        + cost.saved_nbytes + cost.backward_extra_nbytes
        for k, cost in enumerate(profile.stages)
    )  # fmt: skip


def held_at_turn(profile: Profile, segments: Sequence[Segment], moved: Collection[int]) -> int:
    """Device bytes that the schedule of `tree` surely holds at the turn; carried storages are left out."""
    kept = sum(profile.state_nbytes(s.first) for s in segments if s.again > s.first and s.first not in moved)
    saved = sum(profile.stages[k].saved_nbytes for s in segments for k in range(s.again, s.stop))
    return profile.outside_nbytes + kept + saved + profile.cotangent_nbytes(len(profile)) + profile.turn_nbytes


def tree(n: int, segments: Sequence[Segment], moved: Collection[int], tier: Tier, lean: bool = False) -> Node:
    """The schedule in which the restart checkpoints ``moved`` go to ``tier``.

    A copy out is waited for when the segment behind it has run, a copy in starts when the one behind it is reversed.
    ``lean``: it starts when it is needed, and anew for each stage that is recomputed by itself, so that none lies
    beside a working set.
    """
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = [Phase(PhaseKind.BACKWARD)]
    for segment in segments:
        sweep += _out(segment, segment.first in moved, tier)
    for segment, before in zip(reversed(segments), [*reversed(segments[:-1]), None], strict=True):
        if before is not None and before.first in moved and not lean:
            back.append(Prefetch(Value(Kind.STATE, before.first), tier, DEVICE))
        back += (
            _reread(segment, tier)
            if lean and segment.first in moved
            else _reversed(segment, segment.first in moved, tier)
        )
    return Series((*sweep, *back))


def _out(segment: Segment, moves: bool, tier: Tier) -> Iterator[Node]:
    """A segment in the first sweep."""
    first, again, stop, _ = segment
    state = Value(Kind.STATE, first)
    if again > first:
        yield Keep(first)
        if moves:
            yield Offload(state, DEVICE, tier)
        yield Forward(first, again)
    if stop > again:
        yield recorded(again, stop)
    if moves:
        yield from (Wait(state, tier), Free(state, DEVICE))


def _reversed(segment: Segment, moved: bool, tier: Tier) -> Iterator[Node]:
    """A segment's backward."""
    first, again, stop, once = segment
    state = Value(Kind.STATE, first)
    if stop > again:
        yield reversed_stages(again, stop)
    if moved:
        yield from (Wait(state, DEVICE), Free(state, tier))
    if once and again > first:
        yield from (Restore(first), freed(first), recorded(first, again), reversed_stages(first, again))
    if not once:
        for stage in range(again - 1, first - 1, -1):
            yield Restore(first)
            yield Forward(first, stage) if stage > first else freed(first)
            yield from (Record(stage), Backward(stage))


def _reread(segment: Segment, tier: Tier) -> Iterator[Node]:
    """A segment's backward that reads its restart checkpoint whenever it is needed."""
    first, again, stop, once = segment
    state = Value(Kind.STATE, first)
    if stop > again:
        yield reversed_stages(again, stop)
    for start in [first] if once else range(again - 1, first - 1, -1):
        yield from (Prefetch(state, tier, DEVICE), Wait(state, DEVICE))
        if start == first:
            yield Free(state, tier)
        yield from (Restore(first), freed(first))
        if start > first:
            yield Forward(first, start)
        end = again if once else start + 1
        yield from (recorded(start, end), reversed_stages(start, end))
