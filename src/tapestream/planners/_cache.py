"""A tensor cache on paper: which values leave a tier that is too small for all of them."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["furthest", "lru"]


def evicted(sizes: Sequence[int], accesses: Sequence[int], capacity: int, policy: Policy) -> list[int]:
    """Values that leave a cache of ``capacity`` bytes before their last use, in this order (again, if again they do).

    ``accesses`` names the values, by their place in ``sizes``, in the order in which they are used. Room is made only
    when it is needed, and a value used for the last time goes by itself. "lru" evicts what was used longest ago
    (SuperNeurons' tensor cache); "furthest" what is used again last of all, the order being known (Belady 1966: fewest
    evictions for values of one size). The value in use always has its place. O(accesses log accesses).
    """
    later: list[list[int]] = [[] for _ in sizes]
    for at in reversed(range(len(accesses))):
        later[accesses[at]].append(at)
    held: dict[int, int] = {}  # value: its last access
    queue: list[tuple[int, int, int]] = []  # (who goes first, value, access); out of date where ``held`` says otherwise
    left: list[int] = []
    free = capacity
    for at, value in enumerate(accesses):
        later[value].pop()
        free -= 0 if value in held else sizes[value]
        held[value] = at
        while free < 0 and len(held) > 1:
            _, victim, since = heappop(queue)
            if held.get(victim) == since:
                free += sizes[victim]
                del held[victim]
                left.append(victim)
        if later[value]:
            heappush(queue, (at if policy == "lru" else -later[value][-1], value, at))
        else:
            free += sizes[value]
            del held[value]
    return left
