"""`BlockStore`: moves parameter blocks as the schedule says, and keeps what users see of them true."""

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from torch import nn

from tapestream.errors import GradientError, InputError
from tapestream.executor.copies import SHOWN, BlockCopies
from tapestream.executor.engines.protocol import CopyEngine
from tapestream.executor.gradients import GradientBook, Sums
from tapestream.executor.interruptions import interruptions_after
from tapestream.executor.loans import Loans
from tapestream.executor.shard_book import ShardBook
from tapestream.executor.shard_copies import ShardCopies
from tapestream.executor.sharing import Shards
from tapestream.executor.stepped import SteppedGradient
from tapestream.executor.updates import Updater, Updates
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeLike, home_tiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool
from tapestream.storage.transfer import aligned_empty, round_up

__all__ = ["BlockStore", "Updater"]

Replaced: TypeAlias = tuple[Value, int, int]
"""A value, the number of one of its parameters, and the address of what a user has put there."""


class BlockStore:
    """All copies of all block values.

    Outside a run a parameter's ``.data`` shows its home: a view of the region where PARAMETERS live (device, host, or
    a shared
    mapping of the file). ``uses``: the block of each of the model's blocks of code, ``modules``,
    None for none. ``home``: the tier where values live, or one for each kind; as an attribute, that of parameters.
    """

    def __init__(
        self, pool: Pool, engine: CopyEngine, modules: Sequence[nn.Module], uses: Sequence[int | None],
        home: HomeLike, device: torch.device, shards: Shards | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.engine, self.modules, self.uses = pool, engine, modules, uses
        homes = home_tiers(home)
        self.homes, self.device = homes, device
        self.blocks: list[ParameterBlock] = []
        self.copies: BlockCopies
        self.gradients: GradientBook
        if shards is None:
            self.copies = BlockCopies(pool, engine, self.blocks, homes, device)
            self.gradients = GradientBook(self.copies)
        else:
            self.copies = divided = ShardCopies(pool, engine, self.blocks, homes, device, shards)
            self.gradients = ShardBook(divided)
        self.home = self.copies.home_of(Value(Kind.PARAMETERS, 0))
        self.loans = Loans(pool, self.blocks, self.copies)
        self.updates = Updates(pool, self.copies, self.gradients, self.loans)
        self.has_gradient = self.updates.has_gradient
        self.lend, self.give_back, self.keep = self.loans.lend, self.loans.give_back, self.loans.keep
        self.look_ahead, self.advance_ahead = self.loans.look_ahead, self.loans.advance_ahead
        self.drop_ahead = self.loans.drop_ahead

    # -- what the interpreter asks (the protocol `Blocks`) -----------------------------------------------------------

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying one value."""
        if value.kind is Kind.GRADIENT and source is Tier.DEVICE:
            if not self.gradients.leaves(value.index):
                return
            self.gradients.lay_out(value.index)
            if isinstance(self.gradients, ShardBook):
                self.copies.tickets[value, target] = self.gradients.sum(value.index)
                return
        # State that no update has written yet is nowhere; other sources vanish when another live call settles.
        if target is self.copies.near and value in self.copies.resident:  # another live call has brought it
            return
        at_home = source is self.copies.home_of(value)
        if at_home and value.kind is Kind.OPTIMIZER_STATE and not self.copies.holds(value, source):
            self.copies.reserve(value)
        elif at_home or self.copies.has(value, source):
            self.copies.start(value, source, target)

    def wait(self, value: Value, tier: Tier) -> None:
        """Until that copy, or the updates of a block in HOST, have ended."""
        if tier is Tier.HOST and value.kind is Kind.PARAMETERS:
            self.copies.end_updates(value.index)
        self.copies.wait(value, tier)

    def free(self, value: Value, tier: Tier) -> None:
        """Drop a copy; bytes at home stay reserved, and gradients there stay visible until the user drops them."""
        if tier is self.copies.home_of(value) or (tier is self.copies.near and value in self.copies.resident):
            return
        if tier is Tier.DEVICE and value.kind in SHOWN:
            self.copies.show(value, self.copies.home_of(value))
        self.copies.release(value, tier)

    def update(self, block: int, part: int, tier: Tier) -> None:
        """Apply the optimizer's rule to one part of a block whose values are on the device, or begin to in HOST."""
        self.updates.run_on_host(block, part) if tier is Tier.HOST else self.updates.run(((block, part),))

    def compute_begins(self, block: int | None) -> None:
        """A stage is about to use ``block``; released regions must not linger beside the stage's own memory."""
        self.pool.trim()
        if block is not None:
            self.lend(block)
            self.engine.compute_begins(self.copies.device_regions(block))

    def compute_ended(self, block: int | None) -> None:
        """The stage has been issued."""
        if block is not None:
            self.engine.compute_ended(self.copies.device_regions(block))

    def take_gradients(self, block: int, sums: Sums) -> None:
        """Take a block's gradients over from a call: nothing of that call will add to them any more."""
        self.gradients.take(block, sums)
        if self.copies.shards is not None:
            if block in self.gradients.fresh and not self.blocks[block].layout.nbytes:
                self.gradients.accumulate(block)  # without numbers: no plan sums them
            return
        if self.gradients.are_own(block):
            self.gradients.fresh[block] = self.gradients.hooked(block)  # hooks may raise: before others are told
            self.share(block)
        if block in self.gradients.fresh and self._stays(block) and not self.gradients.together:
            self.gradients.accumulate(block)

    def share(self, block: int | None, there: Sequence[torch.Tensor | None] | None = None) -> None:
        """Sum a block's gradients over ranks; before, those of others that come first on other ranks, where this one
        has left them out. ``there``: of what is no block, whose turn is waited for (``block`` None: until all ranks
        have ended the backward)."""
        sharing, eager = self.gradients.sharing, self.updates.eager
        while sharing is not None:
            own = there if block is None or there is not None else self.gradients.there(block)
            now = sharing.announce(block, own or ())
            if now is None:
                self._update_left_out()
            if now is None or (now == block and there is not None):
                return
            self.gradients.share(now, eager=eager)
            if now == block:
                return
            if eager and self.home is not Tier.DEVICE:  # no room is planned for its update now
                self.gradients.send_home(now)
                self.gradients.left_out.append(now)
            else:
                self._settle_gradient(now)

    def _update_left_out(self) -> None:
        """Blocks that other ranks have run, and this one has left out: their turn comes when the tape is gone."""
        while self.gradients.left_out:
            block = self.gradients.left_out.pop()
            if not self.updates.is_hosted(block):
                self.gradients.bring_back(block)
            self.updates.now(block)
            for tier in (Tier.DEVICE, self.copies.home_of(Value(Kind.GRADIENT, block))):
                self.copies.release(Value(Kind.GRADIENT, block), tier)

    # -- between calls --------------------------------------------------------------------------------------------

    def settle(self, *, publish: bool = True) -> None:
        """After a phase, or an exception in it: nothing in flight, everything at its home, gradients visible (if
        ``publish``)."""
        with interruptions_after():
            self._settle(publish)

    def _settle(self, publish: bool) -> None:
        try:
            self.updates.finish()
            for block in list(self.gradients.fresh) if publish or not self.gradients.together else ():
                self._settle_gradient(block)
        finally:
            self.loans.forget()
            self.copies.settle()
            if publish:
                self.gradients.publish()
            self.pool.trim()

    def place(self, resident: frozenset[Value], on_disk: frozenset[Value] | None = None) -> None:
        """Move parameters and optimizer state so that exactly ``resident`` lives on the device; `settle` leaves it
        there. The disk is the home of ``on_disk`` then, whatever that of their kinds is (None: of what it is now)."""
        self.copies.staying = resident
        if self.home is self.copies.near:
            return
        copies, before = self.copies, self.copies.resident
        found = copies.on_disk if on_disk is None else on_disk
        for value in sorted(found - copies.on_disk, key=_order):  # first: that makes room on the host
            self._rehome(value, copies.on_disk | {value})
        rising = {value for value in copies.on_disk - found if copies.has(value, Tier.DISK)}
        copies.on_disk = found | rising
        for value in sorted(before - resident, key=_order):
            if copies.has(value, copies.near) and self._is_moved(value):
                copies.reserve(value, below=True)  # plans fill the host with what is not resident
                copies.move(value, copies.near, copies.home_of(value))
            copies.resident -= {value}  # not before: until then what users put into parameters goes there
        for value in sorted(resident - before, key=_order):
            if copies.has(value, copies.home_of(value)) and self._is_moved(value):
                copies.move(value, copies.home_of(value), copies.near)
            copies.resident |= {value}
        for value in sorted(rising, key=_order):
            self._rehome(value, copies.on_disk - {value})
        copies.dirty -= resident
        copies.hand_over()
        self.pool.trim()

    def _is_moved(self, value: Value) -> bool:
        """Whether it is moved as it is: whole gradients that live on the device are tensors of their own."""
        return value.kind is not Kind.GRADIENT or self.copies.shards is not None

    def _rehome(self, value: Value, on_disk: frozenset[Value]) -> None:
        """Move what lies at the value's home to that which it has with these ``on_disk``."""
        copies, source = self.copies, self.copies.home_of(value)
        target = copies.home_of(value, on_disk)
        with interruptions_after():  # else neither would be the home of what has moved
            if source is not target and copies.holds(value, source):
                if value.kind is Kind.GRADIENT:
                    self.gradients.rehome(value, target)
                else:
                    copies.move(value, source, target)
            elif source is not target:
                copies.release(value, source)  # a place that nothing was written to
            copies.on_disk = on_disk

    def replaced(self) -> frozenset[Replaced]:
        """What users have put into parameters with ``p.data = tensor`` and no copy has yet."""
        values = (value for block in self.blocks for value in self.copies.shown_values(block.index))
        return frozenset((value, *found) for value in values for found in self.copies.replaced(value))

    def adopt_replaced(self, but: frozenset[Replaced] = frozenset()) -> None:
        """Take that over, where nothing is in flight; what a forward has saved of these parameters is of other weights
        from now on. ``but``: what was there already when it saved them."""
        found: dict[Value, list[int]] = {}
        for value, number, _ in self.replaced() - but:
            found.setdefault(value, []).append(number)
        for value, numbers in found.items():
            self.copies.replace(value, numbers)

    def adopt(self, block: ParameterBlock) -> None:
        """Copy a block's parameters from where they are to their home; the Parameter objects show it from now on."""
        self.blocks.append(block)
        self.copies.adopt(block)

    def disown(self, block: int) -> None:
        """Give a block's parameters and gradients memory of their own again."""
        if isinstance(self.gradients, ShardBook):
            self.gradients.show_whole(block)
        for parameter in self.blocks[block].parameters:
            gradient = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.clone()
            if gradient is not None and not isinstance(gradient, SteppedGradient):
                parameter.grad = gradient.to(parameter.device, copy=True)

    def update_left(self, among: Collection[int] | None = None) -> None:
        """Update every block (None: of all) that has a gradient and was not updated by a plan, one after the other;
        together where nothing has to move."""
        left = self.updates.left_on_device(among)
        if self.home is Tier.DEVICE:
            self.updates.run((block, part) for block in left for part in range(self.blocks[block].updates))
            return
        for block in left:
            self.updates.now(block)
            self.settle()

    def drop(self, kind: Kind, block: int | None = None) -> None:
        """Forget all values of one kind, or those of one block."""
        self.updates.forget()
        for value, tier in list(self.copies.regions):
            if value.kind is kind and block in (None, value.index):
                self.copies.release(value, tier)

    def divide_thawed(self, *, live: bool) -> bool:
        """Lay out anew the blocks in which parameters that were frozen take gradients now: these are written back from
        now on. Returns whether there were any. Gradients that users see stay theirs.

        Raises InputError where ``live`` calls still await their backward.
        """
        thawed = [block for block in self.blocks if block.thawed]
        if thawed and live:
            raise InputError(
                "requires_grad was switched on between a forward and its backward, for a parameter that was frozen at "
                "stream(): its block cannot change while that forward's tape exists; call backward() first"
            )
        if thawed:
            self.settle()
            self.place(frozenset())
        for block in thawed:
            self._divide(block)
        return bool(thawed)

    def _divide(self, block: ParameterBlock) -> None:
        copies, gradient = self.copies, Value(Kind.GRADIENT, block.index)
        copies.renew(gradient, copies.home_of(gradient))
        copies.release(gradient, copies.home_of(gradient))
        left = [copies.regions.pop((value, copies.home_of(value))) for value in copies.shown_values(block.index)]
        block.divide()
        copies.adopt(block)
        for region in left:
            copies.engine.release(region)
            self.pool.release(region)

    def exists(self, value: Value) -> bool:
        """Whether the value has bytes where it lives."""
        return self.copies.holds(value, self.copies.tier_of(value))

    def memory_of(self, value: Value) -> torch.Tensor:
        """The bytes of a value where it lives: device memory, host memory, or a shared mapping of its file."""
        if self.copies.tier_of(value) is not self.copies.near:
            self.copies.reserve(value, below=True)
        return self.copies.bytes_at(value, self.copies.tier_of(value))

    def beside(self, kind: Kind, nbytes: int) -> torch.Tensor:
        """At least ``nbytes`` bytes for a copy of values of one kind, which are the caller's: where some live on disk
        a mapping of a file that goes with it, in RAM elsewhere."""
        if self.homes[kind] is not Tier.DISK and not any(value.kind is kind for value in self.copies.on_disk):
            return aligned_empty(nbytes)
        region = self.pool.allocate(Tier.DISK, round_up(nbytes))
        memory = region.file.map()
        self.pool.release(region)  # mapped, so that its file goes and its bytes stay
        return memory

    def version(self, block: int) -> int:
        """Grows whenever a parameter of the block is changed in place, by an update or by the user."""
        return sum(p._version for p in self.blocks[block].parameters)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _stays(self, block: int) -> bool:
        """Whether the block's gradient stays on the device as it is."""
        at_home = self.home is Tier.DEVICE and not self.updates.eager
        return at_home or Value(Kind.GRADIENT, block) in self.copies.resident

    def _settle_gradient(self, block: int) -> None:
        if self.copies.shards is not None:
            raise GradientError(f"gradients of block {block} were to be summed over ranks, and no plan did so")
        if self.updates.eager:
            self.updates.now(block)
        elif self._stays(block):
            self.gradients.accumulate(block)
        else:
            self.gradients.send_home(block)


def _order(value: Value) -> tuple[int, str, int]:
    return value.index, value.kind.value, value.part
