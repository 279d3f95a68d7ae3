"""Which block values live on the disk where the host has no room for all that is at home there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tapestream.costs import Profile
from tapestream.ir import Kind, Value
from tapestream.passes.residency import UpdateMode, traffic
from tapestream.passes.stays import Stay
from tapestream.passes.streaming import Streaming

_FIRST = (Kind.OPTIMIZER_STATE, Kind.GRADIENT, Kind.BUFFERS, Kind.PARAMETERS)  # of what crosses links equally often


@dataclass(frozen=True, slots=True)
class Overflow:
    """``corridor``: values, of the largest that live on the disk, that the host has room for on their way; ``spacing``:
    the values of one block in so many go to the disk first, so that its copies are spread over the step."""

    corridor: int = 4
    spacing: int = 4

    def on_disk(
        self, streaming: Streaming, stays: Sequence[Stay], kinds: Iterable[Kind], host_nbytes: int, update: UpdateMode
    ) -> frozenset[Value]:
        """The values that live on the disk so that the rest, and what passes through, fits ``host_nbytes``: those that
        cross links least often, as few as will do. With updates in the backward, those come first that the backward
        comes to first: they are written while it goes on. None where all fits; all where not even that is enough."""
        sizes, kinds = streaming.sizes, frozenset(kinds)
        lives = streaming.on_host(stays)
        excess = sum(sizes[value] for value in lives) + int(streaming.base.host.max()) - host_nbytes
        excess += streaming.updating_nbytes
        if excess <= 0:
            return frozenset()
        chosen, gone, largest = set[Value](), 0, 0
        through = len(streaming.from_disk) > 2
        free = [value for value in lives if value.kind in kinds and not _stays(value, streaming)]
        for value in self._order(free, streaming.profile, update):
            if gone >= excess + through * self.corridor * largest:
                break
            chosen.add(value)
            gone, largest = gone + sizes[value], max(largest, sizes[value])
        return frozenset(chosen)

    def _order(self, values: Sequence[Value], profile: Profile, update: UpdateMode) -> list[Value]:
        crossings, back = traffic(profile, update), update == "backward"
        blocks = {block: number for number, block in enumerate(sorted({v.index for v in values}, reverse=back))}

        def key(value: Value) -> tuple[int, int, int, int, int]:
            number = blocks[value.index]
            return crossings.get(value, 0), _FIRST.index(value.kind), number % self.spacing, number, value.part

        return sorted(values, key=key)


def _stays(value: Value, streaming: Streaming) -> bool:
    """Whether an update in HOST needs it there: one that goes on under the next forward, in which nothing comes for
    it; of a gradient, one within the backward that has made it."""
    if value.kind is Kind.GRADIENT and streaming.update == "backward":
        return value.index in streaming.hosted.blocks
    return value.kind is not Kind.BUFFERS and value.index in streaming.hosted.late


CHANGES: tuple[tuple[str, tuple[int, ...]], ...] = (("spacing", (2, 1)), ("corridor", (5, 7, 9)), ("corridor", (3, 2)))
"""What else to try, one after the other as long as it helps."""
