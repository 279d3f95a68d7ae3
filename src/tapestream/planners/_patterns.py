"""Computations said stage by stage: what the first sweep records, keeps or only runs (`joint`)."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Literal, TypeAlias

from tapestream.costs import Machine, Profile
from tapestream.ir import Forward, Keep, Node, Phase, PhaseKind, Restore, Series, Tier
from tapestream.planners._recurrences import freed, recorded, reversed_stages

SHORTEST = 8  # stages; of such chains there are 1,597 patterns at most
Taken: TypeAlias = Literal["record", "keep", "forward"]
"""What the first sweep does with a stage: record it, keep its input and run it, or run it."""


def patterned(pattern: Sequence[Taken]) -> Node:
    """Stages that are not recorded in the first sweep are recomputed together with those behind them, up to the next
    that is recorded or whose input is kept; the input of the first of them is kept anyway. It is made live once more
    when they are recorded: so the last of their states goes before the backward, and a copy in may start by then."""
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = []
    for first, stop in _runs(pattern):
        record = pattern[first] == "record"
        sweep += [recorded(first, stop)] if record else [Keep(first), Forward(first, stop)]
        again: list[Node] = [] if record else [Restore(first), recorded(first, stop), Restore(first), freed(first)]
        back.append(Series((*again, reversed_stages(first, stop))))
    return Series((*sweep, Phase(PhaseKind.BACKWARD), *reversed(back)))


def _runs(pattern: Sequence[Taken]) -> Iterator[tuple[int, int]]:
    """Stages of equal treatment: (first, stop)."""
    first = 0
    for k in range(1, len(pattern) + 1):
        if k == len(pattern) or pattern[k] == "keep" or (pattern[k] == "record") != (pattern[k - 1] == "record"):
            yield first, k
            first = k


def every_pattern(profile: Profile, limit: int, machine: Machine | None, tier: Tier) -> list[tuple[float, Node]]:
    """All computations of `patterned`, with seconds that they cannot beat within ``limit`` device bytes, least first.

    What the device cannot hold at the turn leaves it before and comes back after.
    """
    out = back = inf
    if machine is not None:
        out = machine.link(Tier.DEVICE, tier).bytes_per_second
        back = machine.link(tier, Tier.DEVICE).bytes_per_second
    found: list[tuple[float, Sequence[Taken]]] = []
    choices: tuple[Taken, ...] = ("record", "keep", "forward")
    for pattern in product(choices, repeat=len(profile)):
        # A run without a kept input would be the same as the one that "keep" begins.
        if all(b != "forward" or a != "record" for a, b in zip(("record", *pattern), pattern, strict=False)):
            sweep, after, nbytes = _at_turn(profile, pattern)
            moved = max(0, nbytes - limit)
            found.append((max(sweep, moved / out) + max(after, moved / back), pattern))
    found.sort(key=lambda pair: pair[0])
    return [(seconds, patterned(pattern)) for seconds, pattern in found]


def _at_turn(profile: Profile, pattern: Sequence[Taken]) -> tuple[float, float, int]:
    """Seconds before the turn, those from it on, and device bytes there, with nothing moved."""
    n, sweep, after = len(profile), 0.0, profile.turn_seconds
    nbytes = profile.outside_nbytes + profile.cotangent_nbytes(n) + profile.turn_nbytes
    held = {n}
    for k, (cost, taken) in enumerate(zip(profile.stages, pattern, strict=True)):
        after += cost.backward_seconds
        if taken == "record":
            sweep += cost.recorded_seconds
            nbytes += cost.saved_nbytes
            held |= ({k} if cost.reads_input else set()) | ({k + 1} if cost.reads_output else set())
        else:
            sweep += cost.forward_seconds
            after += cost.recorded_seconds
            held |= {k} if taken == "keep" else set()
    return sweep, after, nbytes + sum(profile.state_nbytes(k) for k in held)
