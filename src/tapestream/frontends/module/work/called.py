"""`WorkOfCall`: what one call of a streamed model does between the blocks of its chains."""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch

from tapestream.frontends.module.observing.arguments import Link
from tapestream.frontends.module.observing.observed import Segment
from tapestream.frontends.module.work.tracing import Again, Tracing
from tapestream.frontends.module.work.work import Border, Works, numbers_of
from tapestream.runner.state import State, take_apart


class WorkOfCall:
    """``once``: per segment, stages that run a single time; nothing behind them runs again. ``call``: held weakly by
    saved tensors that are dropped, as in `Saved`. ``trace`` None: nothing is to be traced."""

    def __init__(
        self, segments: Sequence[Segment], once: Sequence[frozenset[int]], device: torch.device, call: Again
    ) -> None:
        self._segments, self._once = segments, once
        traced = any(self._traces(s, k) for s, one in enumerate(segments) for k in range(len(one.positions)))
        self.trace = Tracing(device, weakref.ref(call)) if traced else None
        self._works = [Works() if any(cut is not None for cut in one.cuts) else None for one in segments]
        self._last = (-1, -1)  # segment and stage of the block that was called last
        self._chain: list[torch.Tensor] = []  # the state of the chain, from which work led to the block at hand

    def _traces(self, segment: int, k: int) -> bool:
        """Whether work behind stage ``k`` may have to run again, or makes a state that something is run again from."""
        stages, once = range(k, len(self._segments[segment].cuts)), self._once[segment]
        return any(one not in once for one in stages) and bool(self._cuts(segment, k))

    def _cuts(self, segment: int, k: int, end: int | None = None) -> list[tuple[int, ...]]:
        """How work behind stage ``k`` may be cut, as far as stage ``end``: a call may leave out some blocks."""
        return [cut for cut in self._segments[segment].cuts[k + 1 : end] if cut is not None]

    def of(self, segment: int) -> Works | None:
        """Of one chain, for its interpreter."""
        return self._works[segment]

    def links(self, segment: int, k: int, tensors: Sequence[torch.Tensor], block: State) -> State | None:
        """The state of the chain where the block of stage ``k`` is called on ``tensors``, those of the state ``block``,
        which work of the model has made of it, as planned; None where it has not."""
        (number, last), works = self._last, self._works[segment]
        if number != segment or works is None or not (cuts := self._cuts(segment, last, k + 1)):
            return None
        if not self._traces(segment, last):
            return block
        trace, cut = self.trace, cuts[0]
        if trace is None or trace.work is None or any(one not in trace.kept for one in cut):
            return None
        sources = tuple(map(trace.source, tensors))
        if trace.work.needed(numbers_of(sources), frozenset(cut)) is None:
            return None
        self._chain = [trace.kept[one] for one in cut]
        state, _ = take_apart(tuple(self._chain))
        looks = tuple((t.shape, t.dtype) for t in tensors)
        bare = replace(block, tensors=())
        trace.work.border = Border(cut, replace(state, tensors=()), sources, bare, looks)
        works.before[k], works.entering[k] = trace.work, block
        return state

    def begin(self, segment: int, k: int, given: Sequence[tuple[int, torch.Tensor]], entries: int, link: Link) -> None:
        """The block of stage ``k`` has returned. ``given``: tensors that stand for its state of so many ``entries``."""
        self._last, works, chain = (segment, k), self._works[segment], self._chain
        self._chain = []
        if self.trace is None:
            return
        if works is None or not self._traces(segment, k):
            self.trace.leave()
            self.trace.see(link.tensors)
            return
        values, count = numbered(chain, given, entries, link)
        drops = k not in self._once[segment]
        work = self.trace.begin(values, count, keep=frozenset(self._cuts(segment, k)[0]), drops=drops)
        work.place = segment, k
        if drops:
            works.after[k] = work

    def end(self) -> None:
        """The model has returned: nothing more is traced."""
        if self.trace is not None:
            self.trace.leave()
            self.trace = None

    def forget(self, segment: int, k: int) -> None:
        """The backward of the block of stage ``k`` begins."""
        works = self._works[segment]
        if works is not None:
            works.forget(k)


def numbered(
    chain: Sequence[torch.Tensor], given: Sequence[tuple[int, torch.Tensor]], entries: int, link: Link
) -> tuple[list[tuple[int, torch.Tensor]], int]:
    """What stands for the first values of the `Work` behind a block, each with its number, and how many there are:
    the state of the ``chain``, where work led from that to the block, the block's own, and what ``link`` says that it
    has made."""
    first, behind = len(chain), len(chain) + entries
    made = [(behind + entry, t) for entry, t, version in link.names.values() if t._version == version]
    return [*enumerate(chain), *((first + entry, t) for entry, t in given), *made], behind + len(link.tensors)
