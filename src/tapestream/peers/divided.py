"""`DividedBlocks`: the shards of a model's blocks, gathered from all ranks and summed over them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from tapestream.costs import Link
from tapestream.costs.profile import SUMMED_AT_ONCE
from tapestream.executor.sharing import Addends
from tapestream.ir.actions import Tier
from tapestream.peers.agreement import Agreement
from tapestream.peers.collectives import Pending, as_bytes
from tapestream.peers.sums import sum_over_ranks
from tapestream.storage.blocks import Share
from tapestream.storage.layout import TENSOR_ALIGNMENT

_SIZES, _TIMES = (4096, 2**21), 5  # bytes of a rank's shard that are gathered to measure how fast that is
_STEP = 512  # bytes: what is cut at multiples holds whole numbers of any width
_GATHER, _SUM = "came to the shards of a block", "came to the sum of a block's gradients"
_STATE = "came to an optimizer's state"


class DividedBlocks:
    """Each run of ``among`` neighbouring ranks has one copy of the blocks, which is divided among them; where there are
    several such runs (machines, say), each has a copy. ``share``: this rank's. ``bytes_moved``: that have come from
    other ranks, by lane: to the device of gathers, from it of sums; ``wait_seconds``: waited for them."""

    def __init__(self, agreement: Agreement, device: torch.device, among: int) -> None:
        self._agreement, self._device = agreement, device
        self.share = Share(agreement.rank % among, among)
        self._copies = agreement.size // among
        self._first = agreement.rank - self.share.rank
        self._near = agreement.among(range(self._first, self._first + among))
        alike = range(self.share.rank, agreement.size, among)  # which have the same part of other copies
        self._far = agreement.among(alike) if self._copies > 1 else None
        self.bytes_moved, self.wait_seconds = Counter[tuple[Tier, Tier]](), 0.0

    def meet(self, what: str, document: object) -> None:
        """See `Shards`."""
        self._agreement.agree(what, document)

    def measured(self) -> dict[tuple[Tier, Tier], Link]:
        """The links to other ranks, by gathers and sums of a little and of more; every rank must measure."""
        return {lane: self._link(lane) for lane in ((Tier.SHARD, Tier.DEVICE), (Tier.DEVICE, Tier.SHARD))}

    def _link(self, lane: tuple[Tier, Tier]) -> Link:
        little, more = (self._seconds_of(lane, nbytes) for nbytes in _SIZES)
        moved = (_SIZES[1] - _SIZES[0]) * (self.share.ranks - 1)
        return Link(moved / max(more - little, 1e-9), little)

    def _seconds_of(self, lane: tuple[Tier, Tier], nbytes: int) -> float:
        shard = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        whole = torch.zeros(nbytes * self.share.ranks, dtype=torch.uint8, device=self._device)
        addends = [Addends(0, nbytes, torch.float32, range(self._agreement.size), False)]
        seconds = []
        for _ in range(_TIMES):
            begin = perf_counter()
            (self.sum(whole, shard, addends) if lane[0] is Tier.DEVICE else self.gather(shard, whole)).wait()
            if self._device.type != "cpu":
                whole[:1].cpu()
            seconds.append(perf_counter() - begin)
        self.bytes_moved.clear()
        self.wait_seconds = 0.0
        return median(seconds)

    def gather(self, shard: Tensor, whole: Tensor) -> "Coming":
        """See `Shards`."""
        self.bytes_moved[Tier.SHARD, Tier.DEVICE] += whole.numel() - shard.numel()
        begin = partial(self._near.gather, whole, shard)
        return Coming(self, _GATHER, begin, (whole, shard))

    def sum(self, whole: Tensor, shard: Tensor, addends: Sequence[Addends]) -> "Coming":
        """See `Shards`. What is larger than is sent at once goes piece by piece, and is there when this returns, but
        for the last one."""
        size, part, addends = self.share.ranks, shard.numel(), _joined(addends)
        self.bytes_moved[Tier.DEVICE, Tier.SHARD] += whole.numel() - part
        allowed, beside = min(SUMMED_AT_ONCE, whole.numel()), 0 if self._far is None else 1 + self._copies
        if whole.numel() <= SUMMED_AT_ONCE and not beside:
            return self._begin(whole, shard, 0, addends)
        length = max(1, allowed // (2 * size + beside) // _STEP) * _STEP
        packed = torch.empty(size * min(length, part), dtype=torch.uint8, device=whole.device)
        rows = whole.view(size, part)
        for first in range(0, part, length):
            last = min(first + length, part)
            sent = packed[: size * (last - first)].view(size, last - first).copy_(rows[:, first:last])
            coming = self._begin(sent.view(-1), shard[first:last], first, addends)
            if last < part:
                coming.wait()
        return coming

    def complete(self, flat: Tensor) -> None:
        """See `Shards`. Bytes are added, of which all but one are zero."""
        there = as_bytes(flat).to(self._device)
        self.waited(_STATE, partial(self._near.add, there))
        if there.data_ptr() != flat.data_ptr():
            as_bytes(flat).copy_(there)

    def ordered(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Sums over ranks of whole tensors, added as gradients of blocks are; every rank must ask."""
        found = sum_over_ranks(tensors, self._near.group)
        return found if self._far is None else sum_over_ranks(found, self._far.group)

    def largest(self, found: Tensor) -> None:
        """See `Shards`."""
        there = found.to(self._device)
        self.waited(_STATE, partial(self._agreement.collectives.largest, there))
        if there is not found:
            found.copy_(there)

    def _begin(self, whole: Tensor, shard: Tensor, first: int, addends: Sequence[Addends]) -> "Coming":
        came = torch.empty_like(whole)
        begin = partial(self._near.exchange, came, whole)
        return Coming(self, _SUM, begin, (whole, came), lambda: self._add(came, shard, first, addends))

    def _add(self, came: Tensor, shard: Tensor, first: int, addends: Sequence[Addends]) -> None:
        """Add up what has come of bytes ``first`` on: in the order of ranks; where there are several copies, the sums
        of each in the order of these."""
        mine = range(self._first, self._first + self.share.ranks)
        own = [replace(one, ranks=[r - self._first for r in one.ranks if r in mine]) for one in addends]
        if self._far is None:
            _add(came, shard, first, own)
            return
        far = self._far
        inside = torch.zeros_like(shard)
        _add(came, inside, first, [replace(one, begun=False) for one in own])
        every = torch.empty(self._copies * shard.numel(), dtype=torch.uint8, device=shard.device)
        self.waited(_SUM, lambda: far.gather(every, inside).wait())
        among = self.share.ranks
        _add(every, shard, first, [replace(one, ranks=sorted({r // among for r in one.ranks})) for one in addends])

    def waited(self, what: str, work: Callable[[], object]) -> None:
        """Wait for something, and count the seconds."""
        start = perf_counter()
        try:
            self._agreement.waited(what, work)
        finally:
            self.wait_seconds += perf_counter() - start


class Coming:
    """See `Arrival`. ``held``: what must stay until it has come; ``then``: what is done with it."""

    def __init__(
        self,
        blocks: DividedBlocks,
        what: str,
        begin: Callable[[], Pending],
        held: tuple[Tensor, ...],
        then: Callable[[], None] | None = None,
    ) -> None:
        self._blocks, self._what, self._held, self._then = blocks, what, held, then
        with torch.no_grad():
            self._work = blocks._agreement.waited(what, begin)
        self._done = False

    def wait(self) -> None:
        """See `Arrival`."""
        if self._done:
            return
        self._done = True
        self._blocks.waited(self._what, self._work.wait)
        if self._then is not None:
            with torch.no_grad():
                self._then()
        self._held, self._then = (), None


def _joined(addends: Sequence[Addends]) -> list[Addends]:
    """Neighbours that the same ranks have, as one: fewer kernels. Of what lies between them, to align the second,
    nobody reads the sums."""
    found: list[Addends] = []
    for one in addends:
        last = found[-1] if found else one
        alike = (last.dtype, last.begun, list(last.ranks)) == (one.dtype, one.begun, list(one.ranks))
        if found and alike and one.first - last.last < TENSOR_ALIGNMENT:
            found[-1] = replace(last, last=one.last)
        else:
            found.append(one)
    return found


def _add(came: Tensor, shard: Tensor, first: int, addends: Sequence[Addends]) -> None:
    """Add up rows of ``came``, by the numbers that `Addends.ranks` gives, of bytes ``first`` on of a shard."""
    length = shard.numel()
    for one in addends:
        low, high = max(one.first - first, 0), min(one.last - first, length)
        if low >= high:
            continue
        own = shard[low:high].view(one.dtype)
        rows = as_bytes(came).view(-1, length)[:, low:high]
        theirs = [rows[rank].view(one.dtype) for rank in one.ranks]
        if not one.begun and len(theirs) == 1:
            own.copy_(theirs[0])
        elif not one.begun and theirs:
            torch.add(theirs[0], theirs[1], out=own)
        for other in theirs if one.begun else theirs[2:]:
            own.add_(other)
