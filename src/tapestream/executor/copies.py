"""`BlockCopies`: the copies of block values that come and go, and what the Parameter objects show."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch.autograd.graph import increment_version

from tapestream.errors import InputError, StorageError, TapestreamError
from tapestream.executor.block_regions import BlockRegions, users_of
from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.executor.on_host import UpdatesOnHost
from tapestream.executor.sharing import Arrival, Shards
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region

SHOWN = (Kind.PARAMETERS, Kind.BUFFERS)
"""The values that Parameter objects show."""


class BlockCopies(BlockRegions):
    """Copies in flight between the regions, and which of them are newer than home.

    ``direct``: disk and device are one hop apart. ``staying``: values that will live on the device once `settle` finds
    them there.
    """

    def __init__(
        self, pool: Pool, engine: CopyEngine, blocks: Sequence[ParameterBlock], home: HomeTiers, device: torch.device,
        shards: Shards | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pool, engine, blocks, home, shards)
        self.device = device
        self.direct = engine.name not in ("cuda", "fake_streams")
        self.staying: frozenset[Value] = frozenset()
        self.on_host = UpdatesOnHost()
        self.tickets: dict[tuple[Value, Tier], Ticket | Arrival] = {}
        self._begun: tuple[Value, Tier] | None = None  # not among them yet
        self.dirty: set[Value] = set()  # on the device, newer than at home
        self._newer: set[Value] = set()  # on the host, written by updates there, newer than at home below
        self._shown: dict[Value, dict[int, int]] = {}  # addresses of what a block's parameters show, by their numbers

    def adopt(self, block: ParameterBlock) -> None:
        """Copy a new block's parameters home and show them there."""
        for kind in block.kinds:
            value = Value(kind, block.index)
            self._shown.pop(value, None)  # laid out anew: what users have put into parameters is copied as it is
            home = self.home_of(value)
            first = home if home is not Tier.DISK else self.near if self.direct else Tier.HOST
            numbers = block.frozen if kind is Kind.BUFFERS else block.trained
            self.write(value, first, {i: block.parameters[i] for i in numbers})
            if first is not home:
                self.copy_now(value, first, home)
                self.release(value, first)
                self.pool.trim()
            self.show(value, home)

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying."""
        self._look(value, source)
        here, there = self.region(value, source), self.region(value, target)
        self._start(here, there, value, target)

    def _start(self, here: Region, there: Region, value: Value, target: Tier) -> Ticket | Arrival:
        """Start a copy that `settle` drops, should Ctrl-C come before it has arrived."""
        self._begun = value, target
        ticket = self.tickets[value, target] = self._copy(here, there, target)
        self._begun = None
        return ticket

    def _copy(self, here: Region, there: Region, target: Tier) -> Ticket | Arrival:
        return self.engine.copy(here, there)

    def _arrive(self, ticket: Ticket | Arrival) -> None:
        if isinstance(ticket, Ticket):
            self.engine.wait(ticket)
        else:
            ticket.wait()

    def wait(self, value: Value, tier: Tier) -> None:
        """Until a copy that was started has ended; nothing where another live call has settled meanwhile."""
        ticket = self.tickets.get((value, tier))
        if ticket is None:
            return
        self._arrive(ticket)
        self.tickets.pop((value, tier), None)  # not before: interrupted, it has not arrived
        if tier is Tier.DEVICE and value.kind in SHOWN:
            self.show(value, Tier.DEVICE)
        if tier is self.home_of(value):
            self.dirty.discard(value)
            self._newer.discard(value)
            self.resident -= {value}

    def copy_now(self, value: Value, source: Tier, target: Tier) -> None:
        """Copy and wait, by way of the host where there is no direct link."""
        through = None if self.direct or {source, target} != {self.near, Tier.DISK} else Tier.HOST
        self._look(value, source)
        for here, there in ((source, through or target), (through, target)):
            if here is not None:
                ticket = self._start(self.region(value, here), self.region(value, there), value, there)
                try:
                    self._arrive(ticket)
                except StorageError:
                    del self.tickets[value, there]
                    raise
                del self.tickets[value, there]
        if through is not None:
            self.release(value, through)
        if target is self.home_of(value):
            self.dirty.discard(value)
            self._newer.discard(value)

    def bytes_at(self, value: Value, tier: Tier) -> torch.Tensor:
        """The bytes of a copy: device memory, host memory, or a shared mapping of its file."""
        return self.bytes_of(self.region(value, tier))

    def bytes_of(self, region: Region) -> torch.Tensor:
        """The same, of a region."""
        return region.file.map() if region.extent is not None else region.memory

    def show(self, value: Value, tier: Tier) -> None:
        """Let the Parameter objects show the copy in ``tier``."""
        self.adopt_replaced(value)
        block = self.blocks[value.index]
        views = block.views(self.bytes_at(value, tier), value.kind)
        block.show(views)
        self._shown[value] = {i: view.data_ptr() for i, view in views.items()}

    def write(self, value: Value, tier: Tier, tensors: Mapping[int, torch.Tensor]) -> None:
        """Copy whole tensors, by number of their parameter, into a copy: what of them is its own."""
        views = self.blocks[value.index].views(self._to_write(value, tier), value.kind)
        with torch.no_grad():
            for i, tensor in tensors.items():
                views[i].copy_(tensor)

    def take_back(self, value: Value) -> None:
        """What was written into the copy on the device is the value's from now on."""
        self.copy_now(value, Tier.DEVICE, self.home_of(value))

    def adopt_replaced(self, value: Value) -> None:
        """What a user put into a parameter with ``p.data = tensor`` is written to all copies that are there, before
        they are read or shown again."""
        self.replace(value, [number for number, _ in self.replaced(value)])

    def replaced(self, value: Value) -> list[tuple[int, int]]:
        """What users have put into a value's parameters and no copy has yet: their numbers, and addresses."""
        if value.kind not in SHOWN or self.on_host.uses(value.index) or not self.has(value, self.tier_of(value)):
            return []  # who writes to ``.data`` waits for an update
        parameters, shown = self.blocks[value.index].parameters, self._shown.get(value, {})
        return [(i, now) for i, address in shown.items() if (now := parameters[i].data_ptr()) != address]

    def replace(self, value: Value, numbers: Sequence[int]) -> None:
        """Take over what some of them hold; bytes that tensors of users still show, such as a ``p.data`` that is to be
        put back, are left to them. Raises InputError where one is of another shape or dtype."""
        if not numbers:
            return
        block, home = self.blocks[value.index], self.tier_of(value)
        parameters, looked_at = block.parameters, self._looked_at(value, home, but=numbers)
        views = block.views(self.bytes_at(value, home), value.kind)
        for number in numbers:
            check_alike(parameters[number], views[number])
        if looked_at:
            before = self.bytes_at(value, home)
            self.renew(value, home)
            views = block.views(self._to_write(value, home).copy_(before), value.kind)
        for tier in (Tier.HOST, Tier.DEVICE):
            if tier is not home and self.has(value, tier) and (value, tier) not in self.tickets:
                there = block.views(self.bytes_at(value, tier), value.kind)
                for number in numbers:
                    there[number].copy_(parameters[number].data)
        self._to_write(value, home)
        for number in numbers:
            views[number].copy_(parameters[number].data)
            increment_version(parameters[number])  # a call whose backward is to come must not recompute with it
        shown = self._shown[value]
        block.show({i: view for i, view in views.items() if i in numbers or parameters[i].data_ptr() == shown[i]})
        shown |= {i: view.data_ptr() for i, view in views.items()}

    def device_regions(self, block: int, *, part: int | None = None) -> list[Region]:
        """What a stage that uses the block touches, or the update of one part of its state."""
        if part is None:
            found = [self.regions.get((Value(kind, block), Tier.DEVICE)) for kind in SHOWN]
        else:
            state, near = Value(Kind.OPTIMIZER_STATE, block, part), self.near
            values = (Value(Kind.PARAMETERS, block), Value(Kind.GRADIENT, block), state)
            found = [self.regions.get((value, near)) for value in values]
        return [region for region in found if region is not None]

    def settle(self) -> None:
        """Nothing in flight, every value at its home alone. Raises the first error, after all that could be
        saved is."""
        under_way = [*self.tickets, *([] if self._begun is None else [self._begun])]
        arriving = {value for value, tier in under_way if tier is self.near}
        if under_way:
            for ticket in self.tickets.values():
                if not isinstance(ticket, Ticket):
                    with suppress(StorageError):
                        ticket.wait()  # other ranks may be in it
            self.engine.abandon()
            self.tickets.clear()
            self._begun = None
        whole, near = self.shards is None, self.near  # gradients are tensors of their own where they are whole
        new = [v for v in self.staying - self.resident if not (whole and v.kind is Kind.GRADIENT)]
        self.resident |= {value for value in new if self.has(value, near)} - arriving
        self.dirty -= self.resident
        self._lived |= self.resident
        moved = [(v, tier) for v, tier in self.regions if tier is not near or v not in self.resident]
        away = [(value, tier) for value, tier in moved if tier is not self.home_of(value)]
        failed = [error for value, tier in away if (error := self._taken_home(value, tier)) is not None]
        self.hand_over()
        for region in [region for region in self._left if users_of(region.memory) == 0]:
            self._left.remove(region)
            self.pool.release(region)
        if failed:
            raise failed[0]

    def _taken_home(self, value: Value, tier: Tier) -> TapestreamError | None:
        """Let the home alone have a value of which there is a copy in ``tier``; what has kept it from that."""
        failed, near = None, self.near
        try:
            if tier is Tier.HOST:
                self.end_updates(value.index)
            between = tier is not near and not self.has(value, near)
            if (value in self._newer and tier is Tier.HOST) or (value in self.dirty and (tier is near or between)):
                self.copy_now(value, tier, self.home_of(value))
            if tier is Tier.DEVICE and value.kind in SHOWN:
                self.show(value, self.home_of(value))
        except StorageError as error:
            return error  # the copy on the device stays: it is the only one
        except TapestreamError as error:  # of an update, which has not happened
            failed = error
        self.release(value, tier)
        return failed

    def hand_over(self) -> None:
        """The one place that lets users have what they can touch: until it is called again they read and write what
        ``.data``, ``.grad`` and optimizer state show at home, so nothing may copy from or to it any more."""
        self.engine.hand_over([region for region in self.regions.values() if region.uses])

    def move(self, value: Value, source: Tier, target: Tier) -> None:
        """Let a value live elsewhere from now on; gradients go with their parameters."""
        self.copy_now(value, source, target)
        if value.kind in SHOWN and self.shards is None:
            parameters = [self.blocks[value.index].parameters[i] for i in self._shown.get(value, {})]
            gradients = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            self.show(value, target)
            for p, gradient in zip(parameters, gradients, strict=True):
                if isinstance(gradient, SteppedGradient):
                    p.grad = SteppedGradient.standing_for(p)
                else:
                    p.grad = gradient if gradient is None else gradient.to(p.device)
        self.release(value, source)

    def _to_write(self, value: Value, tier: Tier) -> torch.Tensor:
        """The bytes of a copy, for us to write: none of what was copied from or to them before, be it for another
        region that lay there, is still to happen."""
        if tier is Tier.HOST:
            self.engine.hand_over([self.region(value, tier)])
        return self.bytes_at(value, tier)

    def _looked_at(self, value: Value, tier: Tier, but: Sequence[int]) -> bool:
        """Whether tensors besides the parameters that show a copy (all of the value's ``but`` those) do so too."""
        region = self.regions[value, tier]
        if region.extent is not None:
            return region.extent.mapped  # by whom cannot be told
        return users_of(region.memory) > len(self._shown[value]) - len(but)

    def on_the_host(self, block: int, part: int) -> tuple[Callable[[], None], dict[Value, torch.Tensor]]:
        """What waits until an update of a part may begin in HOST, and the bytes there that it reads and writes. What
        lives below is brought where no plan has done so; it is newer there than at home when the update has ended."""
        values = [Value(Kind.PARAMETERS, block), Value(Kind.GRADIENT, block)]
        if self.blocks[block].nbytes_of(Kind.OPTIMIZER_STATE, part):
            values.append(Value(Kind.OPTIMIZER_STATE, block, part))
        regions: dict[Value, Region] = {}
        for value in values:
            self.wait(value, Tier.HOST)
            if value.kind is Kind.GRADIENT:  # a user's own may be used
                if self.has(value, Tier.HOST):
                    regions[value] = self.region(value, Tier.HOST)
                continue
            home = self.home_of(value)
            if home is not Tier.HOST and not self.has(value, Tier.HOST):
                if self.holds(value, home):
                    self.copy_now(value, home, Tier.HOST)
                else:
                    self.reserve(value)
            regions[value] = self.region(value, Tier.HOST)
            if home is not Tier.HOST:
                self._newer.add(value)
        return self.engine.on_host(list(regions.values())), {v: region.memory for v, region in regions.items()}

    def end_updates(self, block: int) -> None:
        """Wait for the updates of a block in HOST. Where one has failed, what lives below is there as it was before."""
        try:
            self.on_host.end(block)
        except TapestreamError:
            self._newer -= {value for value in self._newer if value.index == block}
            raise

    def end_on_host(self, block: int) -> None:
        """The same; what they have written goes home, where that is below."""
        self.end_updates(block)
        for value in [value for value in self._newer if value.index == block]:
            self.copy_now(value, Tier.HOST, self.home_of(value))
            self.release(value, Tier.HOST)

    def _look(self, value: Value, source: Tier) -> None:
        self.end_updates(value.index)
        if source is self.tier_of(value):
            self.adopt_replaced(value)


def check_alike(found: torch.Tensor, was: torch.Tensor) -> None:
    """Raise InputError where what a user has put into a parameter is not as it was."""
    if (found.dtype, found.shape) != (was.dtype, was.shape):
        raise InputError(
            f"a streamed parameter's data was replaced by {found.dtype} of shape {list(found.shape)}, it was "
            f"{was.dtype} of {list(was.shape)}; convert or resize the model before stream(), or call "
            "tapestream.unstream(model), which keeps the new data, and stream it again"
        )
