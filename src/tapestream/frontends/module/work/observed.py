"""`ObservedWork`: what an observed call does between blocks, and what that adds to the costs of chains."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import torch

from tapestream.costs import StageCost
from tapestream.frontends.module.observing.arguments import BlockRun, Link, entering
from tapestream.frontends.module.observing.observed import Segment
from tapestream.frontends.module.work.called import numbered
from tapestream.frontends.module.work.tracing import Size, Tracing
from tapestream.frontends.module.work.work import Work, numbers_of
from tapestream.runner.state import State, storages, take_apart
from tapestream.storage.meter import MemoryMeter


@dataclass(slots=True)
class _Last:
    """The block called last: its position, its chain, its state there, what it made. ``versions``: of the state of its
    chain, where it is linked by work."""

    position: int
    segment: Segment
    state: State
    out: State
    versions: tuple[int, ...] | None


@dataclass(slots=True)
class Linked:
    """A block that goes on through work. ``cut``: the values of its chain's state; ``chain``: those that are still
    there. Bytes: ``state_nbytes`` of that state that the state before did not hold, ``own_nbytes`` of the block's state
    that are not in it, ``both_nbytes`` of the two; ``made_nbytes`` that the block before made, ``saved_nbytes`` that
    the work saves."""

    segment: Segment
    cut: tuple[int, ...]
    chain: list[torch.Tensor]
    state_nbytes: int
    own_nbytes: int
    both_nbytes: int
    made_nbytes: int
    saved_nbytes: int


KEPT = "it is not called on the result of the block before; between='recompute' may make one chain of what lies between"
OTHERWISE = "it is not called on what functions that can be run again made of the result of the block before"


class ObservedWork:
    """Links a block to the one before it where all that it is called on comes from that block through functions that
    can be run again. The work is cut where the state of the chain is smallest; what is before the cut belongs to the
    stage of the block before."""

    def __init__(self, device: torch.device, parts: Container[int] | None) -> None:
        """``parts``: positions of blocks that are not linked so (None: no block is, and nothing is traced).
        ``written``: of those whose chain's state is written into by work behind them, though they are."""
        self.trace, self.traces, self.written = Tracing(device), parts is not None, set[int]()
        self.parts = () if parts is None else parts
        self._last: _Last | None = None
        self.why = OTHERWISE if self.traces else KEPT  # the block called last is not linked, where it is not

    def begin(
        self, position: int, segment: Segment, linked: Linked | None, state: State, out: State,
        given: Sequence[tuple[int, torch.Tensor]], link: Link, *, may_follow: bool,
    ) -> None:  # fmt: skip
        """A block has returned. ``given``: see `given_to`. ``may_follow``: the next one may be linked to it."""
        chain = [] if linked is None else linked.chain
        state_of_chain = take_apart(tuple(chain))[0] if chain else state
        self._last = _Last(position, segment, state_of_chain, out, state_of_chain.versions if chain else None)
        if not self.traces:
            return
        if may_follow and torch.is_grad_enabled():
            self.trace.begin(*numbered(chain, given, len(state.tensors), link))
        else:
            self.trace.leave()
            self.trace.see(link.tensors)

    def links(self, tensors: Sequence[torch.Tensor], link: Link) -> Linked | None:
        """How the block that is called with ``tensors`` goes on through work, None where it does not. Saved tensors of
        the work are let go of, which a recompute makes again."""
        trace, last = self.trace, self._last
        if not self.traces:
            return None
        self.why = OTHERWISE if trace.unfit is None else trace.unfit
        if last is None or trace.work is None or not tensors or not torch.is_grad_enabled():
            return None
        wanting = [t for t in tensors if t.requires_grad]
        if not wanting or all(link.entry(t) is not None for t in wanting):
            return None
        found = entering(tensors)
        if not found[0].requires_grad or trace.number(found[0]) is None:
            return None
        if not all(trace.number(t) is not None or trace.is_known(t) for t in found):
            return None
        self._look(last)
        self._last, saved = None, trace.stand_in()
        cut = _smallest(trace.work, numbers_of(list(map(trace.source, found))), trace.sizes)
        chain = [trace.alive(number) for number in cut]
        before, travellers = storages(last.state.tensors), last.segment.travellers
        assert travellers is not None
        travellers.follow(last.state, take_apart(tuple(chain))[0])
        sizes = {trace.sizes[number] for number in cut}
        state = sum(size.nbytes for size in sizes if size.address not in before)
        own = {size for t in found if (size := trace.size(t)) not in sizes}
        both, whole = sum(size.nbytes for size in (*sizes, *own)), sum(size.nbytes for size in sizes)
        made = sum(storages(last.out.tensors).values())
        return Linked(last.segment, cut, chain, state, both - whole, both, made, saved)

    def ends(self) -> None:
        """The section between two blocks ends: what the last block made is the state of the next one."""
        last, self._last = self._last, None
        if last is not None and last.segment.travellers is not None:
            self._look(last)
            last.segment.travellers.follow(last.state, last.out)
            self.trace.leave()

    def _look(self, last: _Last) -> None:
        if last.versions is not None and last.state.versions != last.versions:
            self.written.add(last.position)


def _smallest(work: Work, wanted: Sequence[int], sizes: dict[int, Size]) -> tuple[int, ...]:
    """The values that are needed, to make ``wanted``, from one place in the work on, at the first place of those where
    they take the fewest bytes: what is before work that makes a norm, say, may be needed behind the next block."""
    order = work.needed(wanted, range(work.count))
    assert order is not None
    cuts, needed = [set(wanted)], set(wanted)
    for number in reversed(order):
        operation = work.operations[number]
        needed = (needed - set(operation.made.values())) | operation.used()
        cuts.append(needed)
    best = min(reversed(cuts), key=lambda cut: sum(size.nbytes for size in {sizes[number] for number in cut}))
    return tuple(sorted(best))


def with_work(
    cost: StageCost, linked: Linked, meter: MemoryMeter | None, seconds: float, used_nbytes: int
) -> StageCost:
    """The cost of a block with that of work behind it, which took so many ``seconds``, and the bytes of ``meter``.
    ``used_nbytes``: of what the block was given and the work uses, too, whose gradients are held for that."""
    kept = cost.output_nbytes if cost.reads_output else 0  # by the block's backward: no state of the chain any more
    extra = max(0, linked.made_nbytes + (0 if meter is None else meter.peak_nbytes) - linked.state_nbytes)
    return replace(
        cost,
        forward_seconds=cost.forward_seconds + seconds,
        record_seconds=cost.recorded_seconds + seconds,
        backward_seconds=cost.backward_seconds + seconds,
        output_nbytes=linked.state_nbytes,
        saved_nbytes=cost.saved_nbytes + kept + linked.saved_nbytes,
        reads_output=False,
        forward_extra_nbytes=max(cost.forward_extra_nbytes, extra),
        record_extra_nbytes=max(cost.recorded_extra_nbytes, extra),
        backward_extra_nbytes=cost.backward_extra_nbytes + used_nbytes,
        cotangent_nbytes=max(cost.cotangent_bytes, linked.state_nbytes),
    )


def behind_work(cost: StageCost, own_nbytes: int) -> StageCost:
    """The cost of a block with that of work before it: of what it is given, ``own_nbytes`` are not in the state of its
    chain."""
    saved = own_nbytes if cost.reads_input else 0
    return replace(
        cost,
        reads_input=cost.reads_input and not own_nbytes,
        saved_nbytes=cost.saved_nbytes + saved,
        forward_extra_nbytes=cost.forward_extra_nbytes + own_nbytes,
        record_extra_nbytes=cost.recorded_extra_nbytes + own_nbytes - saved,
    )


def given_to(run: BlockRun) -> list[tuple[int, torch.Tensor]]:
    """Tensors that stand for the state of a block's call, by entry, before it is finished."""
    return [*enumerate(run.tensors), *((entry, t) for entry, held in run.held_of.items() for t in held)]
