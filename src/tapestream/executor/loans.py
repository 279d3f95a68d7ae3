"""`Loans`: blocks whose parameters are brought to the device where no plan says so."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tapestream.errors import BudgetError
from tapestream.executor.copies import SHOWN, BlockCopies
from tapestream.executor.shard_copies import ShardCopies
from tapestream.ir.actions import Tier, Value
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool

_SAMPLES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The versions of parameters, and sums of some of the words of a block's memory: writes by way of ``p.data`` change
    no version."""

    versions: list[int]
    sums: list[torch.Tensor]

    def differs(self, other: "Look") -> bool:
        """Whether there was a write in between; one of few numbers by way of ``p.data`` may not be noticed."""
        return self.versions != other.versions or not all(map(torch.equal, self.sums, other.sums))


class Loans:
    """Blocks that are lent: for a call that no plan covers, one without gradients, or an update."""

    def __init__(self, pool: Pool, blocks: Sequence[ParameterBlock], copies: BlockCopies) -> None:
        self._pool, self._blocks, self._copies = pool, blocks, copies
        self._ahead: list[Value] = []  # what `look_ahead` has started to bring, in that order
        self._brought: dict[int, list[Value]] = {}  # by block, what the last `lend` has brought

    def lend(self, block: int) -> bool:
        """Bring a block's parameters to the device now, if they are not there; returns whether any were brought.
        `BlockStore.settle` returns them."""
        brought = self._brought[block] = [value for value in self._copies.shown_values(block) if self.bring(value)]
        return bool(brought)

    def bring(self, value: Value) -> bool:
        """The same for one value that a block's parameters show."""
        copies = self._copies
        for tier in (Tier.HOST, copies.near, Tier.DEVICE):
            copies.wait(value, tier)
        ahead = value in self._ahead
        if ahead:
            self._ahead.remove(value)
        if not isinstance(copies, ShardCopies):
            return self._bring_near(value, ahead=ahead)
        if copies.has(value, Tier.DEVICE):
            return False
        comes = self._bring_near(value, ahead=ahead)
        copies.gather_now(value)
        if comes:
            copies.release(value, copies.near)
        return True

    def bring_near(self, value: Value) -> bool:
        """Bring what an update works on; returns whether anything was brought. See `BlockRegions.near`."""
        for tier in (Tier.HOST, self._copies.near):
            self._copies.wait(value, tier)
        return self._bring_near(value, ahead=False)

    def _bring_near(self, value: Value, *, ahead: bool) -> bool:
        copies, near = self._copies, self._copies.near
        if copies.tier_of(value) is near or copies.has(value, near):
            if ahead and copies.home_of(value) is Tier.DISK:
                copies.release(value, Tier.HOST)
            return ahead
        if ahead:  # half way
            copies.start(value, Tier.HOST, near)
            copies.wait(value, near)
            copies.release(value, Tier.HOST)
        else:
            copies.copy_now(value, copies.home_of(value), near)
            if near is Tier.DEVICE and value.kind in SHOWN:
                copies.show(value, near)
        return True

    def look_ahead(self, block: int, limit_nbytes: int) -> bool:
        """Start bringing a block that will be lent, unless more than ``limit_nbytes`` of the device would be held; by
        way of the host, two blocks at a time. Returns whether it is there or on its way."""
        copies = self._copies
        missing = [value for value in copies.shown_values(block) if not self._on_its_way(value)]
        if not missing:
            return True
        coming = [value for value in missing if self._one_hop(value)]
        fits = self._pool.held_nbytes(Tier.DEVICE) + sum(map(self._nbytes, coming)) <= limit_nbytes or not coming
        if len(coming) < len(missing):
            fits = fits and len({value.index for value in self._ahead if not self._one_hop(value)}) < 2
        for value in missing if fits else ():
            try:
                copies.start(value, copies.home_of(value), copies.near if self._one_hop(value) else Tier.HOST)
            except BudgetError:  # the host is full
                return False
            self._ahead.append(value)
        return fits

    def advance_ahead(self, limit_nbytes: int) -> None:
        """Let the next of the blocks that are half way go on to the device, within ``limit_nbytes`` there."""
        half_way = [value for value in self._ahead if not self._one_hop(value)]
        copies = self._copies
        for value in [value for value in half_way if value.index == half_way[0].index]:
            held = self._pool.held_nbytes(Tier.DEVICE)
            if not copies.has(value, copies.near) and held + self._nbytes(value) <= limit_nbytes:
                copies.wait(value, Tier.HOST)
                copies.start(value, Tier.HOST, copies.near)

    def drop_ahead(self) -> None:
        """Give up what `look_ahead` has started to bring and nobody was lent, where no other call uses the store."""
        self._ahead.clear()
        self._copies.settle()

    def forget(self) -> None:
        """Everything is about to be settled."""
        self._ahead.clear()
        self._brought.clear()

    def give_back(self, block: int, *, written: bool = False) -> None:
        """End a `lend` that has brought something. ``written``: and that has been written into."""
        for value in self._brought.pop(block, []):
            if written:
                self._copies.take_back(value)
            self._copies.show(value, self._copies.home_of(value))
            self._copies.release(value, Tier.DEVICE)

    def look(self, block: int) -> Look:
        """What tells whether somebody has written into a block's parameters since another look."""
        versions = [p._version for p in self._blocks[block].parameters]
        memories = (self._copies.bytes_at(value, Tier.DEVICE) for value in self._copies.shown_values(block))
        whole = (memory[: memory.numel() // 8 * 8].view(torch.int64) for memory in memories)
        return Look(versions, [words[:: max(1, len(words) // _SAMPLES)].sum() for words in whole])

    def keep(self, block: int) -> bool:
        """End a `lend` by letting what it has brought live on the device, until `BlockStore.place` moves it. Not where
        the block has gradients, which live with their parameters: returns whether it stays."""
        if self._copies.shards is not None or any(p.grad is not None for p in self._blocks[block].parameters):
            return False
        for value in self._brought.pop(block, []):
            self._copies.resident |= {value}
            self._copies.staying |= {value}
            self._copies.release(value, self._copies.home_of(value))
        return True

    def _one_hop(self, value: Value) -> bool:
        """Whether a copy brings it from its home to the device."""
        return self._copies.direct or self._copies.home_of(value) is Tier.HOST

    def _on_its_way(self, value: Value) -> bool:
        copies = self._copies
        there = copies.tier_of(value) is copies.near or copies.has(value, copies.near)
        return there or (copies.home_of(value) is Tier.DISK and copies.has(value, Tier.HOST))

    def _nbytes(self, value: Value) -> int:
        return self._blocks[value.index].nbytes_of(value.kind)
