"""Seconds that no schedule can beat with given stays of block values on the device."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tapestream.costs import Machine, Profile
from tapestream.ir import Kind, Phase, PhaseKind, Schedule, Tier, Update
from tapestream.passes.memory import compute_seconds
from tapestream.passes.stays import Stay
from tapestream.passes.streaming import Streaming


def bound_seconds(streaming: Streaming, stays: Sequence[Stay]) -> float:
    """The most of: computation; copies between two tiers, both ways; copies of a lane, of which those out cannot start
    before the computation that makes them, and those in must end before the one that needs them."""
    machine, compute = streaming.machine, streaming.seconds
    bounds = [float(compute[-1]), _host_seconds(streaming)]
    if machine is None:
        return bounds[0]
    ways_in, ways_out = (
        defaultdict[tuple[Tier, Tier], list[Stay]](list),
        defaultdict[tuple[Tier, Tier], list[Stay]](list),
    )
    for stay in stays:
        for lane in pairwise(stay.arrive):
            ways_in[lane].append(stay)
        for lane in pairwise(stay.leave):
            ways_out[lane].append(stay)
    for lane, found in ways_in.items():
        left = compute[-1] - compute[[stay.start for stay in found]]
        bounds.append(_in_turn(machine, lane, left, found))
    for lane, found in ways_out.items():
        bounds.append(_in_turn(machine, lane, compute[[stay.stop + 1 for stay in found]], found))
        bounds.append(_pair_seconds(machine, lane, found, ways_in.get(lane[::-1], [])))
    bounds += [_pair_seconds(machine, lane, ways_in[lane], []) for lane in ways_in if lane[::-1] not in ways_out]
    return max(bounds)


def _host_seconds(streaming: Streaming) -> float:
    """Of updates in HOST, one after the other: each is begun when backward has made its gradient, or, where that is the
    step's before, ended before its block runs."""
    seconds, blocks, late = streaming.seconds, streaming.profile.blocks, streaming.hosted.late
    first = {value.index: runs[0].start for value, runs in streaming.runs.items() if value.kind is Kind.PARAMETERS}
    free = least = 0.0
    for position, action in enumerate(streaming.computation if streaming.hosted.blocks else ()):
        if not isinstance(action, Update) or action.tier is not Tier.HOST:
            continue
        took = blocks[action.block].part_seconds(action.part, Tier.HOST)
        if action.block in late:
            free += took
            least = max(least, free + float(seconds[-1] - seconds[first[action.block]]))
        else:
            free = max(free, float(seconds[position])) + took
    return max(least, free)


def updates_on_host(schedule: Schedule, profile: Profile) -> float:
    """Seconds of the updates in HOST; or of those that go on under the next forward, and of all that comes after that.
    0 where there are none."""
    took, late, after, turned = 0.0, 0.0, 0.0, False
    for action in schedule:
        turned = turned or action == Phase(PhaseKind.BACKWARD)
        if isinstance(action, Update) and action.tier is Tier.HOST:
            seconds = profile.blocks[action.block].part_seconds(action.part, Tier.HOST)
            took, late = took + seconds, late + (0.0 if turned else seconds)
        after += compute_seconds(action, profile) if turned else 0.0
    return max(took, late + after) if late else took


def before_updates(schedule: Schedule, profile: Profile) -> float:
    """Seconds of the computation up to the end of the first update, 0 where there is none: what updates make is not
    written before."""
    total = 0.0
    for action in schedule:
        total += compute_seconds(action, profile)
        if isinstance(action, Update):
            return total
    return 0.0


def serial_seconds(streaming: Streaming, stays: Sequence[Stay]) -> float:
    """What a schedule takes, at the least, that waits for every copy."""
    compute, machine = float(streaming.seconds[-1]), streaming.machine
    if machine is None:
        return compute
    copies = (copy for stay in stays for copy in stay.copies())
    return compute + sum(machine.link(*lane).seconds(nbytes) for lane, nbytes in copies)


def _in_turn(machine: Machine, lane: tuple[Tier, Tier], apart: NDArray[np.float64], stays: Sequence[Stay]) -> float:
    """Copies of one lane, each with so many seconds before it, or after it, in which it cannot be made: those with the
    most of them, and the least of their seconds."""
    order = np.argsort(-apart, kind="stable")
    nbytes = np.array(_moved(lane, stays), dtype=np.float64)[order]
    return float((apart[order] + np.cumsum(nbytes) / machine.link(*lane).bytes_per_second).max())


def _moved(lane: tuple[Tier, Tier], stays: Sequence[Stay]) -> list[int]:
    """Bytes of each of their copies."""
    return [stay.moved_nbytes(*lane) if stay.shard else stay.nbytes for stay in stays]


def _pair_seconds(machine: Machine, lane: tuple[Tier, Tier], there: Sequence[Stay], again: Sequence[Stay]) -> float:
    """Both directions between two tiers, one after the other or, as far as that is faster, together."""
    copies, back = _moved(lane, there), _moved(lane, again)
    ahead, behind = machine.link(*lane), machine.link(*lane[::-1])
    if Tier.DEVICE in lane and Tier.SHARD in lane:  # one lane for both directions
        return sum(map(ahead.seconds, (*copies, *back)))
    together = min(sum(copies) / ahead.mixed, sum(back) / behind.mixed)
    # In each second together, so many seconds of copies alone are done.
    done = ahead.mixed / ahead.bytes_per_second + behind.mixed / behind.bytes_per_second
    return sum(map(ahead.seconds, copies)) + sum(map(behind.seconds, back)) - together * max(0.0, done - 1)
