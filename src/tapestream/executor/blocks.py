"""`BlockStore`: moves parameter blocks as the schedule says, and keeps what users see of them true."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tapestream.errors import BudgetError
from tapestream.executor.copies import BlockCopies
from tapestream.executor.engines.protocol import CopyEngine
from tapestream.executor.gradients import Found, GradientBook, Sums
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeTiers, home_tiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool


@dataclass(frozen=True, slots=True)
class Updater:
    """How blocks are updated: ``run`` applies the optimizer's rule in place to every (block, gradients, state views).

    ``eager``: within the backward (``update="backward"``), so that no gradient is ever kept.
    """

    run: Callable[[Sequence[tuple[ParameterBlock, Found, Sequence[torch.Tensor]]]], None]
    eager: bool


class BlockStore:
    """All copies of all block values.

    Outside a run a parameter's ``.data`` shows its home: a view of the region where PARAMETERS live (device, host, or
    a shared
    mapping of the file). ``uses``: the block of each of the model's blocks of code, ``modules``,
    None for none. ``home``: the tier where values live, or one for each kind; as an attribute, that of parameters.
    """

    def __init__(
        self, pool: Pool, engine: CopyEngine, modules: Sequence[nn.Module], uses: Sequence[int | None],
        home: Tier | HomeTiers, device: torch.device,
    ) -> None:  # fmt: skip
        self.pool, self.engine, self.modules, self.uses = pool, engine, modules, uses
        homes = home_tiers(home)
        self.homes, self.home, self.device = homes, homes[Kind.PARAMETERS], device
        self.blocks: list[ParameterBlock] = []
        self.copies = BlockCopies(pool, engine, self.blocks, homes, device)
        self.gradients = GradientBook(self.copies)
        self.updater: Updater | None = None
        self._ahead: list[int] = []  # blocks that `look_ahead` has started to bring, in that order
        self._one_hop = self.home is Tier.HOST or self.copies.direct
        self.updated: set[int] = set()  # blocks whose update has run since this was last cleared
        self._state_views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # where home is the device

    @property
    def eager(self) -> bool:
        """Whether blocks are updated within the backward."""
        return self.updater is not None and self.updater.eager

    # -- what the interpreter asks (the protocol `Blocks`) -----------------------------------------------------------

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying one value."""
        if value.kind is Kind.GRADIENT and source is Tier.DEVICE:
            if value.index not in self.gradients.fresh:
                return  # this backward has left none
            self.gradients.lay_out(value.index)
        # State that no update has written yet has no bytes at home; other sources vanish when another live call
        # settles.
        there = target is Tier.DEVICE and value in self.copies.resident  # another live call has brought it
        if not there and (source is self.copies.home_of(value) or self.copies.has(value, source)):
            self.copies.start(value, source, target)

    def wait(self, value: Value, tier: Tier) -> None:
        """Until that copy has ended."""
        self.copies.wait(value, tier)

    def free(self, value: Value, tier: Tier) -> None:
        """Drop a copy; bytes at home stay reserved, and gradients there stay visible until the user drops them."""
        if tier is self.copies.home_of(value) or (tier is Tier.DEVICE and value in self.copies.resident):
            return
        if tier is Tier.DEVICE and value.kind is Kind.PARAMETERS:
            self.copies.show(value, self.home)
        self.copies.release(value, tier)

    def update(self, block: int) -> None:
        """Apply the optimizer's rule to a block whose values are on the device."""
        self._update((block,))

    def _update(self, blocks: Sequence[int]) -> None:
        assert self.updater is not None
        work: list[tuple[ParameterBlock, Found, Sequence[torch.Tensor]]] = []
        for block in blocks:
            gradients = self.gradients.hooked(block) if self.eager else self.gradients.at_step(block)
            if gradients:
                work.append((self.blocks[block], gradients, self._views_on_device(block)))
        self.updated.update(blocks)
        if not work:
            return
        self.pool.trim()  # released regions must not linger beside the rule's temporaries
        used = [region for this, _, _ in work for region in self.copies.device_regions(this.index, update=True)]
        self.engine.compute_begins(used)
        self.updater.run(work)
        self.engine.compute_ended(used)
        for this, gradients, _ in work:
            if self.home is not Tier.DEVICE:
                self.copies.dirty.update(Value(kind, this.index) for kind in (Kind.PARAMETERS, Kind.OPTIMIZER_STATE))
            if self.eager:
                self.gradients.stepped(this.index, gradients)

    def _views_on_device(self, block: int) -> list[torch.Tensor]:
        this, state = self.blocks[block], Value(Kind.OPTIMIZER_STATE, block)
        return self.state_views(block, self.copies.region(state, Tier.DEVICE).memory) if this.state_slots else []

    def state_views(self, block: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """The optimizer's state of a block over ``memory``; where that never moves the views are kept."""
        known = self._state_views.get(block)
        if known is not None and known[0] is memory:
            return known[1]
        views = self.blocks[block].state_views(memory)
        if self.home is Tier.DEVICE:
            self._state_views[block] = memory, views
        return views

    def has_gradient(self, block: int) -> bool:
        """Whether this call has left a gradient for the block."""
        return block in self.gradients.fresh

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
        if block in self.gradients.fresh and self._stays(block) and not self.gradients.together:
            self.gradients.accumulate(block)

    # -- between calls --------------------------------------------------------------------------------------------

    def settle(self, *, publish: bool = True) -> None:
        """After a phase, or an exception in it: nothing in flight, everything at its home, gradients visible (if
        ``publish``)."""
        try:
            for block in list(self.gradients.fresh) if publish or not self.gradients.together else ():
                self._settle_gradient(block)
        finally:
            self._ahead.clear()
            self.copies.settle()
            if publish:
                self.gradients.publish()
            self.pool.trim()

    def place(self, resident: frozenset[Value]) -> None:
        """Move parameters and optimizer state so that exactly ``resident`` lives on the device; `settle` leaves it
        there."""
        self.copies.staying = resident
        if self.home is Tier.DEVICE:
            return
        copies, before = self.copies, self.copies.resident
        for value in sorted(before - resident, key=_order):
            copies.resident -= {value}
            if copies.has(value, Tier.DEVICE) and value.kind is not Kind.GRADIENT:
                copies.move(value, Tier.DEVICE, copies.home_of(value))
        for value in sorted(resident - before, key=_order):
            if copies.has(value, copies.home_of(value)) and value.kind is not Kind.GRADIENT:
                copies.move(value, copies.home_of(value), Tier.DEVICE)
            copies.resident |= {value}
        copies.dirty -= resident
        self.pool.trim()

    def adopt(self, block: ParameterBlock) -> None:
        """Copy a block's parameters from where they are to their home; the Parameter objects show it from now on."""
        self.blocks.append(block)
        self.copies.adopt(block)

    def disown(self, block: int) -> None:
        """Give a block's parameters and gradients memory of their own again."""
        for parameter in self.blocks[block].parameters:
            gradient = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.clone()
            if gradient is not None and not isinstance(gradient, SteppedGradient):
                parameter.grad = gradient.to(parameter.device, copy=True)

    def lend(self, block: int) -> bool:
        """Bring a block's parameters to the device now, if they are not there; returns whether they were brought.
        `settle` returns them."""
        value, copies = Value(Kind.PARAMETERS, block), self.copies
        for tier in (Tier.HOST, Tier.DEVICE):
            copies.wait(value, tier)
        ahead = block in self._ahead
        if ahead:
            self._ahead.remove(block)
        if copies.tier_of(value) is Tier.DEVICE or copies.has(value, Tier.DEVICE):
            if ahead and self.home is Tier.DISK:
                copies.release(value, Tier.HOST)
            return ahead
        if ahead:  # half way
            copies.start(value, Tier.HOST, Tier.DEVICE)
            copies.wait(value, Tier.DEVICE)
            copies.release(value, Tier.HOST)
        else:
            copies.copy_now(value, self.home, Tier.DEVICE)
            copies.show(value, Tier.DEVICE)
        return True

    def look_ahead(self, block: int, limit_nbytes: int) -> bool:
        """Start bringing a block that will be lent, unless more than ``limit_nbytes`` of the device would be held; by
        way of the host, two at a time. Returns whether it is there or on its way."""
        value, copies = Value(Kind.PARAMETERS, block), self.copies
        if copies.tier_of(value) is Tier.DEVICE or any(
            copies.has(value, tier) for tier in (Tier.DEVICE, Tier.HOST) if tier is not self.home
        ):
            return True
        if self._one_hop:
            fits = self.pool.held_nbytes(Tier.DEVICE) + self.blocks[block].layout.nbytes <= limit_nbytes
        else:
            fits = len(self._ahead) < 2
        if fits:
            try:
                copies.start(value, self.home, Tier.DEVICE if self._one_hop else Tier.HOST)
            except BudgetError:  # the host is full
                return False
            self._ahead.append(block)
        return fits

    def advance_ahead(self, limit_nbytes: int) -> None:
        """Let the next of the blocks that are half way go on to the device, within ``limit_nbytes`` there."""
        if self._one_hop or not self._ahead:
            return
        value, copies = Value(Kind.PARAMETERS, self._ahead[0]), self.copies
        nbytes = self.blocks[self._ahead[0]].layout.nbytes
        if not copies.has(value, Tier.DEVICE) and self.pool.held_nbytes(Tier.DEVICE) + nbytes <= limit_nbytes:
            copies.wait(value, Tier.HOST)
            copies.start(value, Tier.HOST, Tier.DEVICE)

    def drop_ahead(self) -> None:
        """Give up what `look_ahead` has started to bring and nobody was lent, where no other call uses the store."""
        self._ahead.clear()
        self.copies.settle()

    def give_back(self, block: int) -> None:
        """End a `lend` that has brought the block."""
        value = Value(Kind.PARAMETERS, block)
        self.copies.show(value, self.home)
        self.copies.release(value, Tier.DEVICE)

    def keep(self, block: int) -> bool:
        """End a `lend` that has brought the block by letting it live on the device, until `place` moves it. Not where
        it has gradients, which live with their parameters: returns whether it stays."""
        value = Value(Kind.PARAMETERS, block)
        if any(p.grad is not None for p in self.blocks[block].parameters):
            return False
        self.copies.resident |= {value}
        self.copies.staying |= {value}
        self.copies.release(value, self.home)
        return True

    def update_left(self) -> None:
        """Update every block that has a gradient and was not updated by a plan, one after the other; together where
        nothing has to move."""
        left = [block for block in self.blocks if block.index not in self.updated]
        left = [block for block in left if any(p.grad is not None for p in block.parameters)]
        if self.home is Tier.DEVICE:
            self._update([block.index for block in left])
            return
        for block in left:
            self.lend(block.index)
            self._fetch_state(block.index)
            self.update(block.index)
            self.settle()

    def drop(self, kind: Kind) -> None:
        """Forget all values of one kind."""
        self._state_views.clear()
        for value, tier in list(self.copies.regions):
            if value.kind is kind:
                self.copies.release(value, tier)

    def exists(self, value: Value) -> bool:
        """Whether the value has bytes where it lives."""
        return self.copies.has(value, self.copies.tier_of(value))

    def memory_of(self, value: Value) -> torch.Tensor:
        """The bytes of a value where it lives: device memory, host memory, or a shared mapping of its file."""
        return self.copies.bytes_at(value, self.copies.tier_of(value))

    def version(self, block: int) -> int:
        """Grows whenever a parameter of the block is changed in place, by an update or by the user."""
        return sum(p._version for p in self.blocks[block].parameters)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _stays(self, block: int) -> bool:
        """Whether the block's gradient stays on the device as it is."""
        at_home = self.home is Tier.DEVICE and not self.eager
        return at_home or Value(Kind.GRADIENT, block) in self.copies.resident

    def _settle_gradient(self, block: int) -> None:
        if self.eager:
            self.lend(block)
            self._fetch_state(block)
            self.update(block)
        elif self._stays(block):
            self.gradients.accumulate(block)
        else:
            self.gradients.send_home(block)

    def _fetch_state(self, block: int) -> None:
        state = Value(Kind.OPTIMIZER_STATE, block)
        if self.blocks[block].state_slots and not self.copies.has(state, Tier.DEVICE):
            self.copies.copy_now(state, self.copies.home_of(state), Tier.DEVICE)


def _order(value: Value) -> tuple[int, str]:
    return value.index, value.kind.value
