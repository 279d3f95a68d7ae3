"""`BlockStore`: moves parameter blocks as the schedule says, and keeps what users see of them true."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region

Gradients = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Updater:
    """How blocks are updated: ``run(block, gradients, state views)`` applies the optimizer's rule in place."""

    run: Callable[[ParameterBlock, Gradients, Sequence[torch.Tensor]], None]


class BlockStore:
    """All copies of all block values.

    Outside a run a parameter's ``.data`` shows its home: a view of the region where PARAMETERS live (device, host, or a shared
    mapping of the file). ``uses``: the block of each of the model's blocks of code, None for none.
    """

    def __init__(
        self,
        pool: Pool,
        engine: CopyEngine,
        blocks: list[ParameterBlock],
        uses: Sequence[int | None],
        home: Tier,
        device: torch.device,
    ) -> None:
        self.pool, self.engine, self.blocks, self.uses = pool, engine, blocks, uses
        self.home, self.device = home, device
        self.direct = engine.name not in ("cuda", "fake_streams")  # whether disk and device are one hop apart
        self.updater: Updater | None = None
        self.resident: frozenset[Value] = frozenset()
        self.regions: dict[tuple[Value, Tier], Region] = {}
        self.fresh: dict[int, Gradients] = {}  # gradients of this call, not yet at home
        self._tickets: dict[tuple[Value, Tier], Ticket] = {}
        self._dirty: set[Value] = set()  # on the device, newer than at home
        self._unpublished: dict[int, list[int]] = {}
        self.modules: Sequence[nn.Module] = ()
        self.updater_is_eager = False  # update="backward"

    # -- what the interpreter asks (the protocol `Blocks`) -----------------------------------------------------------

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying one value."""
        if value.kind is Kind.GRADIENT and source is Tier.DEVICE:
            self._gather(value)
        if source is self.home:
            self._region(value, source)  # state that no update has written yet has no bytes so far
        if (value, source) not in self.regions:
            return  # another live call has settled the store meanwhile
        there = self._region(value, target)
        self._tickets[value, target] = self.engine.copy(self.regions[value, source], there)

    def wait(self, value: Value, tier: Tier) -> None:
        """Until that copy has ended."""
        ticket = self._tickets.pop((value, tier), None)
        if ticket is None:
            return  # another live call has settled the store meanwhile; `compute_begins` fetches what is missing
        self.engine.wait(ticket)
        if tier is Tier.DEVICE and value.kind is Kind.PARAMETERS:
            self._show(value, Tier.DEVICE)
        if tier is self.home:
            self._dirty.discard(value)

    def free(self, value: Value, tier: Tier) -> None:
        """Drop a copy; bytes at home stay reserved, and gradients there stay visible until the user drops them."""
        if value.kind is Kind.GRADIENT and tier is Tier.DEVICE:
            self.fresh.pop(value.index, None)
        if tier is self.home or (tier is Tier.DEVICE and value in self.resident):
            return
        if tier is Tier.DEVICE and value.kind is Kind.PARAMETERS:
            self._show(value, self.home)
        self._release(value, tier)

    def update(self, block: int) -> None:
        """Apply the optimizer's rule to a block whose values are on the device."""
        assert self.updater is not None
        this = self.blocks[block]
        gradients = self.fresh.pop(block, None)
        if gradients is None:
            gradients = self._gradients_at(block)
        value = Value(Kind.OPTIMIZER_STATE, block)
        views = this.state_views(self._region(value, Tier.DEVICE).memory) if this.state_slots else []
        used = self._device_regions(block, update=True)
        self.engine.compute_begins(used)
        self.updater.run(this, gradients, views)
        self.engine.compute_ended(used)
        self._dirty.update((Value(Kind.PARAMETERS, block), Value(Kind.OPTIMIZER_STATE, block)))

    def has_gradient(self, block: int) -> bool:
        """Whether this call has left a gradient for the block."""
        return bool(self.fresh.get(block))

    def compute_begins(self, block: int | None) -> None:
        """A stage is about to use ``block``; released regions must not linger beside the stage's own memory."""
        self.pool.trim()
        if block is not None:
            self.lend(block)
            self.engine.compute_begins(self._device_regions(block))

    def compute_ended(self, block: int | None) -> None:
        """The stage has been issued."""
        if block is not None:
            self.engine.compute_ended(self._device_regions(block))

    def take_gradients(self, block: int, sums: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take a block's gradients over from a call: nothing will add to them any more."""
        found: Gradients = {}
        for i, parameter in enumerate(self.blocks[block].parameters):
            entry = sums.pop(id(parameter), None)
            if entry is not None:
                found[i] = _through_hooks(parameter, entry[1])
        if not found:
            return
        if Value(Kind.GRADIENT, block) in self.resident or self.home is Tier.DEVICE and not self.updater_is_eager:
            for i, gradient in found.items():
                _accumulate(self.blocks[block].parameters[i], gradient)
        else:
            self.fresh[block] = found

    def collect(self, sums: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over what is left when a backward has ended without asking for every stage."""
        for block in self.blocks:
            self.take_gradients(block.index, sums)

    # -- between calls --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """After a phase, or an exception in it: nothing in flight, everything at its home, gradients visible."""
        if self._tickets:
            self.engine.abandon()
            self._tickets.clear()
        for block in list(self.fresh):
            self._settle_gradient(block)
        for value, tier in list(self.regions):
            if tier is self.home or (tier is Tier.DEVICE and value in self.resident):
                continue
            if tier is Tier.DEVICE and value in self._dirty:
                self._copy_now(value, Tier.DEVICE, self.home)
            if tier is Tier.DEVICE and value.kind is Kind.PARAMETERS:
                self._show(value, self.home)
            self._release(value, tier)
        self._publish()
        self.pool.trim()

    def place(self, resident: frozenset[Value]) -> None:
        """Move parameters and optimizer state so that exactly ``resident`` lives on the device."""
        if self.home is Tier.DEVICE:
            return
        leaving = self.resident - resident
        arriving = resident - self.resident
        for value in sorted(leaving, key=_order):
            if (value, Tier.DEVICE) in self.regions and value.kind is not Kind.GRADIENT:
                self._copy_now(value, Tier.DEVICE, self.home)
                self._move_view(value, self.home)
                self._release(value, Tier.DEVICE)
        self.resident = resident
        for value in sorted(arriving, key=_order):
            if (value, self.home) in self.regions and value.kind is not Kind.GRADIENT:
                self._copy_now(value, self.home, Tier.DEVICE)
                self._move_view(value, Tier.DEVICE)
                self._release(value, self.home)
        self._dirty -= resident
        self.pool.trim()

    def adopt(self, block: ParameterBlock) -> None:
        """Copy a block's parameters from where they are to their home; the Parameter objects show it from now on."""
        self.blocks.append(block)
        value = Value(Kind.PARAMETERS, block.index)
        first = self.home if self.home is not Tier.DISK else Tier.DEVICE if self.direct else Tier.HOST
        with torch.no_grad():
            staging = self._region(value, first)
            for view, parameter in zip(block.views(staging.memory), block.parameters, strict=True):
                view.copy_(parameter)
        if first is not self.home:
            self._copy_now(value, first, self.home)
            self._release(value, first)
            self.pool.trim()
        self._show(value, self.home)

    def disown(self, block: int) -> None:
        """Give a block's parameters and gradients memory of their own again."""
        for parameter in self.blocks[block].parameters:
            gradient = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.clone()
            if gradient is not None:
                parameter.grad = gradient.clone().to(parameter.device)

    def give_back(self, block: int) -> None:
        """End `lend`."""
        value = Value(Kind.PARAMETERS, block)
        if self.tier_of(value) is not Tier.DEVICE:
            self._show(value, self.home)
            self._release(value, Tier.DEVICE)

    def exists(self, value: Value) -> bool:
        """Whether the value has bytes where it lives."""
        return (value, self.tier_of(value)) in self.regions

    def drop(self, kind: Kind) -> None:
        """Forget all values of one kind."""
        for value, tier in list(self.regions):
            if value.kind is kind:
                self._release(value, tier)

    def update_all(self) -> None:
        """Update every block that has a gradient, one after the other, without a plan."""
        for block in self.blocks:
            self.lend(block.index)
            self._fetch_state(block.index)
            self.update(block.index)
            self.settle()

    def tier_of(self, value: Value) -> Tier:
        """Where a value lives between uses."""
        return Tier.DEVICE if value in self.resident else self.home

    def memory_of(self, value: Value) -> torch.Tensor:
        """The bytes of a value where it lives: device memory, host memory, or a shared mapping of its file."""
        return _bytes_of(self._region(value, self.tier_of(value)))

    def write_home(self, value: Value) -> None:
        """Make later direct reads see what was written through `memory_of`."""
        region = self.regions.get((value, self.home))
        if region is not None and region.extent is not None:
            region.extent.flush()

    def lend(self, block: int) -> None:
        """Bring a block's parameters to the device now (profiling, calls without gradients); `settle` returns them."""
        value = Value(Kind.PARAMETERS, block)
        if self.tier_of(value) is not Tier.DEVICE and (value, Tier.DEVICE) not in self.regions:
            self._copy_now(value, self.home, Tier.DEVICE)
            self._show(value, Tier.DEVICE)

    def version(self, block: int) -> int:
        """Grows whenever a parameter of the block is changed in place, by an update or by the user."""
        return sum(p._version for p in self.blocks[block].parameters)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _nbytes(self, value: Value) -> int:
        block = self.blocks[value.index]
        if value.kind is Kind.OPTIMIZER_STATE:
            return 0 if block.state_layout is None else block.state_layout.nbytes
        return block.layout.nbytes

    def _region(self, value: Value, tier: Tier) -> Region:
        region = self.regions.get((value, tier))
        if region is None:
            region = self.regions[value, tier] = self.pool.allocate(tier, self._nbytes(value))
        return region

    def _release(self, value: Value, tier: Tier) -> None:
        region = self.regions.pop((value, tier), None)
        if region is not None:
            self.engine.release(region)
            self.pool.release(region)

    def _copy_now(self, value: Value, source: Tier, target: Tier) -> None:
        through = None if self.direct or {source, target} != {Tier.DEVICE, Tier.DISK} else Tier.HOST
        for here, there in ((source, through or target), (through, target)):
            if here is None:
                continue
            self.engine.wait(self.engine.copy(self._region(value, here), self._region(value, there)))
        if through is not None:
            self._release(value, through)
        if target is self.home:
            self._dirty.discard(value)

    def _show(self, value: Value, tier: Tier) -> None:
        block = self.blocks[value.index]
        block.show(block.views(_bytes_of(self.regions[value, tier])))

    def _move_view(self, value: Value, tier: Tier) -> None:
        if value.kind is Kind.PARAMETERS:
            for parameter in self.blocks[value.index].parameters:
                if parameter.grad is not None and self.device.type == "cuda":
                    parameter.grad = None if tier is Tier.DEVICE else parameter.grad.cpu()
            self._show(value, tier)

    def _device_regions(self, block: int, *, update: bool = False) -> list[Region]:
        """What a stage that uses the block, or its update, touches."""
        kinds = (Kind.PARAMETERS, Kind.GRADIENT, Kind.OPTIMIZER_STATE) if update else (Kind.PARAMETERS,)
        found = (self.regions.get((Value(kind, block), Tier.DEVICE)) for kind in kinds)
        return [region for region in found if region is not None]

    # -- gradients ------------------------------------------------------------------------------------------------

    def _gather(self, value: Value) -> None:
        """Lay the fresh gradients out in one region, added to what earlier micro-batches left at home."""
        block, fresh = self.blocks[value.index], self.fresh.pop(value.index, {})
        region = self._region(value, Tier.DEVICE)
        self.engine.compute_begins([region])
        present = []
        for i, view in enumerate(block.views(region.memory)):
            earlier, gradient = block.parameters[i].grad, fresh.pop(i, None)
            if gradient is None and earlier is None:
                continue
            present.append(i)
            if gradient is not None:
                view.copy_(gradient)
                if earlier is not None:
                    view.add_(earlier.to(view.device))
            elif earlier is not None:
                view.copy_(earlier)
        self.engine.compute_ended([region])
        self._unpublished[value.index] = present

    def _gradients_at(self, block: int) -> Gradients:
        """Gradients for a step: those that users see, read from the device copy where one was fetched."""
        this, value = self.blocks[block], Value(Kind.GRADIENT, block)
        region = self.regions.get((value, Tier.DEVICE))
        home = self.regions.get((value, self.home))
        fetched = None if region is None else this.views(region.memory)
        at_home = [] if home is None else [v.data_ptr() for v in this.views(_bytes_of(home))]
        found: Gradients = {}
        for i, parameter in enumerate(this.parameters):
            if parameter.grad is None:
                continue
            own = bool(at_home) and parameter.grad.data_ptr() == at_home[i]
            if own and fetched is not None:
                found[i] = fetched[i]
            else:
                found[i] = parameter.grad.to(self.device)
        return found

    def _settle_gradient(self, block: int) -> None:
        value = Value(Kind.GRADIENT, block)
        if self.updater is not None and self.updater_is_eager:
            self.lend(block)
            self._fetch_state(block)
            self.update(block)
            return
        self._gather(value)
        self._copy_now(value, Tier.DEVICE, self.home)
        self._release(value, Tier.DEVICE)

    def _fetch_state(self, block: int) -> None:
        state = Value(Kind.OPTIMIZER_STATE, block)
        if self._nbytes(state) and (state, Tier.DEVICE) not in self.regions:
            self._copy_now(state, self.home, Tier.DEVICE)

    def _publish(self) -> None:
        """Let ``.grad`` of the parameters be the gradients that came home."""
        for block, present in self._unpublished.items():
            views = self.blocks[block].views(self.memory_of(Value(Kind.GRADIENT, block)))
            for i in present:
                self.blocks[block].parameters[i].grad = views[i]
                _after_accumulation(self.blocks[block].parameters[i])
        self._unpublished.clear()


def _order(value: Value) -> tuple[int, str]:
    return value.index, value.kind.value


def _bytes_of(region: Region) -> torch.Tensor:
    return region.file.map() if region.extent is not None else region.memory


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)
    _after_accumulation(parameter)


def _through_hooks(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What autograd does with a leaf's hooks: each may replace the gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    return gradient


def _after_accumulation(parameter: torch.Tensor) -> None:
    hooks: Mapping[int, Callable[[torch.Tensor], None]] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    for hook in hooks.values():
        hook(parameter)
