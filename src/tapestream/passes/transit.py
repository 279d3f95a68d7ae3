"""Values of parameter blocks on their way to the device or from it, and whole copies that are gathered from shards."""

from collections import defaultdict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from tapestream.ir import Tier, Value
from tapestream.passes.stays import Stay
from tapestream.simulate.clock import Job


@dataclass(slots=True, eq=False)
class Transit:
    """The value of stay ``number`` on its way along ``path``; the copy into ``path[hop]`` is ``job``; ``ended``: it is
    there. ``leaving``, ``staged``: bytes that it takes meanwhile: of the device on its way out, of the host."""

    number: int
    stay: Stay
    path: tuple[Tier, ...]
    hop: int = 0
    job: Job | None = None
    ended: bool = False
    leaving: int = 0
    staged: int = 0
    outward: bool = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.outward, self.end = self.path[0] < self.path[-1], len(self.path) - 1

    @property
    def last(self) -> bool:
        return self.hop == self.end


class Gathers:
    """Whole copies of blocks that are divided among ranks. ``shard_of``: where one is made of a shard that has come to
    the device before, numbers of both stays; ``shards``: the numbers of those shards."""

    def __init__(self, stays: Sequence[Stay]) -> None:
        self.shard_of = _shards_beside(stays)
        self.shards = frozenset(self.shard_of.values())
        self._due = deque(sorted((stay for stay in stays if stay.divided and stay.arrive), key=lambda s: s.start))

    def begins(self, stay: Stay, target: Tier) -> None:
        """A copy of a stay into ``target`` has begun."""
        if target is Tier.DEVICE and stay.divided:
            self._due.remove(stay)

    def before_nbytes(self, stay: Stay) -> int:
        """Bytes of the next whole copy, where it is needed before ``stay``: shards must not take its room."""
        return self._due[0].nbytes if self._due and self._due[0].start < stay.start else 0


def _shards_beside(stays: Sequence[Stay]) -> dict[int, int]:
    """For whole copies that are gathered from a shard on the device, which has come there before: indices of both."""
    shards: defaultdict[Value, list[int]] = defaultdict(list)
    for index, stay in enumerate(stays):
        if stay.tier is Tier.SHARD and stay.arrive:
            shards[stay.value].append(index)
    found: dict[int, int] = {}
    for index, stay in enumerate(stays):
        if stay.arrive and stay.arrive[0] is Tier.SHARD:
            beside = (k for k in shards[stay.value] if stays[k].start <= stay.start <= stays[k].stop)
            found.update((index, k) for k in beside)
    return found


class Lanes:
    """``of``: the places in ``queue`` of stays that are to come, in order of need, by the first lane that they pass."""

    def __init__(self, stays: Sequence[Stay], queue: Sequence[int]) -> None:
        self._queue = queue
        self.of: dict[tuple[Tier, ...], list[int]] = {}
        for place, i in enumerate(queue):
            self.of.setdefault(stays[i].arrive[:2], []).append(place)
        self._heads = dict.fromkeys(self.of, 0)  # before them all have started

    def waiting(self, started: Container[int]) -> dict[tuple[Tier, ...], int]:
        """For each lane with copies to start, the number of the first of them."""
        for lane, order in self.of.items():
            while self._heads[lane] < len(order) and self._queue[order[self._heads[lane]]] in started:
                self._heads[lane] += 1
        return {lane: place for lane, place in self._heads.items() if place < len(self.of[lane])}
