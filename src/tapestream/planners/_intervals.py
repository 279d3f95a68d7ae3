"""The frame of planners that send one state of every interval to a slower tier while computation goes on."""

from collections.abc import Callable

from tapestream.ir import (
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Repeat,
    Restore,
    Series,
    Shift,
    Tier,
    Value,
    Wait,
)

DEVICE = Tier.DEVICE


def remote_states(n: int, interval: int) -> int:
    """How many states the slower tier holds at most."""
    return max(0, -(-n // interval) - 2)


def framed(n: int, interval: int, tier: Tier, again: Node, last: Callable[[int], tuple[Node, ...]]) -> Node:
    """The schedule of ``n`` stages in intervals of ``interval``, the last one being what remains.

    ``again`` reverses one interval from its first state, which is live and kept, and frees it; ``last(length)`` runs
    the last interval from its live first state through the turn. The copy to ``tier`` starts where an interval starts
    and is waited for where the next one does; the copy back starts one interval ahead. The first state of the last
    interval but one never leaves the device: it would be on its way back as soon as it had arrived. A constant number
    of nodes besides ``again`` and ``last``.
    """
    count = -(-n // interval)
    rest = (count - 1) * interval
    if count == 1:
        return Series((Phase(PhaseKind.FORWARD), *last(n)))
    away = remote_states(n, interval)
    here, before = Value(Kind.STATE, 0), Value(Kind.STATE, -interval)
    leave: tuple[Node, ...] = (Keep(0), Offload(here, DEVICE, tier), Forward(0, interval))
    settle: tuple[Node, ...] = (Wait(before, tier), Free(before, DEVICE))
    stay: tuple[Node, ...] = (Keep(0), Forward(0, interval))
    sweep: list[Node] = [Phase(PhaseKind.FORWARD)]
    back: list[Node] = []
    if away:
        sweep += (*leave, Repeat(Shift(Series((*settle, *leave)), interval), away - 1, interval))
        ahead = Series((
            Prefetch(before, tier, DEVICE), Restore(0), again, Wait(before, DEVICE), Free(before, tier),
        ))  # fmt: skip
        back = [Repeat(Shift(ahead, away * interval), away, -interval)]
        stay = (*settle, *stay)
    sweep.append(Shift(Series(stay), away * interval))
    return Series((*sweep, Shift(Series(last(n - rest)), rest), *back, Restore(0), again))
