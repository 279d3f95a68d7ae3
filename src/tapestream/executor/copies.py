"""`BlockCopies`: where every copy of every block value lies, and what the Parameter objects show."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region

SHOWN = (Kind.PARAMETERS, Kind.BUFFERS)
"""The values that Parameter objects show."""


class BlockCopies:
    """Regions of block values by tier, the copies in flight between them, and which of them are newer than home.

    ``direct``: disk and device are one hop apart. ``resident``: values that live on the device instead of at ``home``;
    ``staying``: those that will once `settle` finds them there; ``on_disk``: values whose home is the disk, whatever
    that of their kind is.
    """

    def __init__(
        self, pool: Pool, engine: CopyEngine, blocks: Sequence[ParameterBlock], home: HomeTiers, device: torch.device
    ) -> None:
        self.pool, self.engine, self.blocks, self.device = pool, engine, blocks, device
        self._homes = home
        self.direct = engine.name not in ("cuda", "fake_streams")
        self.resident: frozenset[Value] = frozenset()
        self.staying: frozenset[Value] = frozenset()
        self.on_disk: frozenset[Value] = frozenset()
        self._lived: set[Value] = set()  # on the device when users last looked
        self.regions: dict[tuple[Value, Tier], Region] = {}
        self.tickets: dict[tuple[Value, Tier], Ticket] = {}
        self._begun: tuple[Value, Tier] | None = None  # not among them yet
        self.dirty: set[Value] = set()  # on the device, newer than at home
        self._blank: set[Value] = set()  # places at home that nothing was written to
        self._left: list[Region] = []  # not ours any more, but to be given back to the pool when users have done
        self._shown: dict[Value, dict[int, int]] = {}  # addresses of what a block's parameters show, by their numbers

    def adopt(self, block: ParameterBlock) -> None:
        """Copy a new block's parameters home and show them there."""
        for kind in block.kinds:
            value = Value(kind, block.index)
            self._shown.pop(value, None)  # laid out anew: what users have put into parameters is copied as it is
            home = self.home_of(value)
            first = home if home is not Tier.DISK else Tier.DEVICE if self.direct else Tier.HOST
            with torch.no_grad():
                for i, view in block.views(self._to_write(value, first), kind).items():
                    view.copy_(block.parameters[i])
            if first is not home:
                self.copy_now(value, first, home)
                self.release(value, first)
                self.pool.trim()
            self.show(value, home)

    def home_of(self, value: Value, on_disk: frozenset[Value] | None = None) -> Tier:
        """Where a value lives that is not resident; where it would with other values ``on_disk``."""
        return Tier.DISK if value in (self.on_disk if on_disk is None else on_disk) else self._homes[value.kind]

    def fills_host(self, value: Value) -> bool:
        """Whether a value at home on the host may go to the disk, and others of the model have."""
        return value.kind in self._homes.overflowing and bool(self.on_disk) and self.home_of(value) is Tier.HOST

    def tier_of(self, value: Value) -> Tier:
        """Where a value lives between uses."""
        return Tier.DEVICE if value in self.resident else self.home_of(value)

    def lives_on_device(self, block: int) -> bool:
        """Whether all of a block's parameters do."""
        return all(self.tier_of(value) is Tier.DEVICE for value in self.shown_values(block))

    def on_device(self, block: int) -> bool:
        """Whether all of a block's parameters are there now."""
        return all(self.has(value, Tier.DEVICE) for value in self.shown_values(block))

    def shown_values(self, block: int) -> tuple[Value, ...]:
        """The values that the block's parameters show."""
        return tuple(Value(kind, block) for kind in self.blocks[block].kinds)

    def region(self, value: Value, tier: Tier) -> Region:
        """The value's copy in ``tier``, made (with undefined content) if there is none."""
        if tier is self.home_of(value):
            self._blank.discard(value)  # who asks for its bytes may write them
        region = self.regions.get((value, tier))
        if region is None:
            try:
                region = self.regions[value, tier] = self.pool.allocate(tier, self._nbytes(value))
            except BudgetError as error:
                held = sum(left.nbytes for left in self._left if left.tier is tier)
                raise (
                    error
                    if not held
                    else error.saying(
                        f"{error.message}; {held} bytes of them are shown by tensors that are still held (gradients of "
                        "earlier steps, say): drop these, or allow so much more"
                    )
                ) from None
        return region

    def reserve(self, value: Value, *, below: bool = False) -> None:
        """Take the place at home of a value that is to be written there for the first time: if there is no room, that
        is told before anything is changed. ``below``: where no plan is under way, on the disk if it may live there, and
        the host would have no room to pass another value through."""
        if self.has(value, self.home_of(value)):
            return
        if below and self.home_of(value) is Tier.HOST and value.kind in self._homes.overflowing:
            room = self.pool.room_nbytes(Tier.HOST)
            passing = max((region.nbytes for region in self.regions.values()), default=0)
            if room is not None and room < self._nbytes(value) + passing:
                self.on_disk |= {value}
        self.region(value, self.home_of(value))
        self._blank.add(value)

    def holds(self, value: Value, tier: Tier) -> bool:
        """Whether there is a copy in ``tier`` that something was written to."""
        return (value, tier) in self.regions and not (value in self._blank and tier is self.home_of(value))

    def has(self, value: Value, tier: Tier) -> bool:
        """Whether there is a copy in ``tier``."""
        return (value, tier) in self.regions

    def release(self, value: Value, tier: Tier) -> None:
        """Drop a copy, if there is one."""
        region = self.regions.pop((value, tier), None)
        if region is None:
            return
        self.engine.release(region)
        lived = tier is Tier.DEVICE and value in self._lived
        self._lived.discard(value)
        if lived and _users(region.memory) > 0:
            self.pool.forget(region)  # users took tensors of what was shown between two calls
        else:
            self.pool.release(region)

    def renew(self, value: Value, tier: Tier) -> None:
        """Where tensors of users still show a copy that is about to be written anew, leave it to them and take other
        bytes."""
        region = self.regions.get((value, tier))
        if region is None:
            return
        if region.extent is not None:
            if region.extent.mapped:
                self.pool.release(self.regions.pop((value, tier)))
        elif _users(region.memory) > 0:
            self._left.append(self.regions.pop((value, tier)))

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start copying."""
        self._look(value, source)
        here, there = self.region(value, source), self.region(value, target)
        self._start(here, there, value, target)

    def _start(self, here: Region, there: Region, value: Value, target: Tier) -> Ticket:
        """Start a copy that `settle` drops, should Ctrl-C come before it has arrived."""
        self._begun = value, target
        ticket = self.tickets[value, target] = self.engine.copy(here, there)
        self._begun = None
        return ticket

    def wait(self, value: Value, tier: Tier) -> None:
        """Until a copy that was started has ended; nothing where another live call has settled meanwhile."""
        ticket = self.tickets.get((value, tier))
        if ticket is None:
            return
        self.engine.wait(ticket)
        self.tickets.pop((value, tier), None)  # not before: interrupted, it has not arrived
        if tier is Tier.DEVICE and value.kind in SHOWN:
            self.show(value, Tier.DEVICE)
        if tier is self.home_of(value):
            self.dirty.discard(value)
            self.resident -= {value}

    def copy_now(self, value: Value, source: Tier, target: Tier) -> None:
        """Copy and wait, by way of the host where there is no direct link."""
        through = None if self.direct or {source, target} != {Tier.DEVICE, Tier.DISK} else Tier.HOST
        self._look(value, source)
        for here, there in ((source, through or target), (through, target)):
            if here is not None:
                ticket = self._start(self.region(value, here), self.region(value, there), value, there)
                try:
                    self.engine.wait(ticket)
                except StorageError:
                    del self.tickets[value, there]
                    raise
                del self.tickets[value, there]
        if through is not None:
            self.release(value, through)
        if target is self.home_of(value):
            self.dirty.discard(value)

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

    def adopt_replaced(self, value: Value) -> None:
        """What a user put into a parameter with ``p.data = tensor`` is written to all copies that are there, before
        they are read or shown again."""
        self.replace(value, [number for number, _ in self.replaced(value)])

    def replaced(self, value: Value) -> list[tuple[int, int]]:
        """What users have put into a value's parameters and no copy has yet: their numbers, and addresses."""
        if value.kind not in SHOWN or not self.has(value, self.tier_of(value)):
            return []
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
            found, was = parameters[number], views[number]
            if (found.dtype, found.shape) != (was.dtype, was.shape):
                raise InputError(
                    f"a streamed parameter's data was replaced by {found.dtype} of shape {list(found.shape)}, it was "
                    f"{was.dtype} of {list(was.shape)}; convert or resize the model before stream(), or call "
                    "tapestream.unstream(model), which keeps the new data, and stream it again"
                )
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
            values = [Value(kind, block) for kind in SHOWN]
        else:
            state = Value(Kind.OPTIMIZER_STATE, block, part)
            values = [Value(Kind.PARAMETERS, block), Value(Kind.GRADIENT, block), state]
        found = (self.regions.get((value, Tier.DEVICE)) for value in values)
        return [region for region in found if region is not None]

    def settle(self) -> None:
        """Nothing in flight, every value at its home alone. Raises the first StorageError, after all that could be
        saved is."""
        under_way = [*self.tickets, *([] if self._begun is None else [self._begun])]
        arriving = {value for value, tier in under_way if tier is Tier.DEVICE}
        if under_way:
            self.engine.abandon()
            self.tickets.clear()
            self._begun = None
        failed: StorageError | None = None
        came = {value for value, tier in self.regions if tier is Tier.DEVICE and value.kind is not Kind.GRADIENT}
        self.resident |= (came & self.staying) - arriving
        self.dirty -= self.resident
        self._lived |= self.resident
        for value, tier in list(self.regions):
            if tier is self.home_of(value) or (tier is Tier.DEVICE and value in self.resident):
                continue
            try:
                if value in self.dirty and (tier is Tier.DEVICE or not self.has(value, Tier.DEVICE)):
                    self.copy_now(value, tier, self.home_of(value))
                if tier is Tier.DEVICE and value.kind in SHOWN:
                    self.show(value, self.home_of(value))
            except StorageError as error:
                failed = failed or error  # the copy on the device stays: it is the only one
                continue
            self.release(value, tier)
        self.hand_over()
        for region in [region for region in self._left if _users(region.memory) == 0]:
            self._left.remove(region)
            self.pool.release(region)
        if failed is not None:
            raise failed

    def hand_over(self) -> None:
        """The one place that lets users have what they can touch: until it is called again they read and write what
        ``.data``, ``.grad`` and optimizer state show at home, so nothing may copy from or to it any more."""
        self.engine.hand_over([region for region in self.regions.values() if region.uses])

    def move(self, value: Value, source: Tier, target: Tier) -> None:
        """Let a value live elsewhere from now on; gradients go with their parameters."""
        self.copy_now(value, source, target)
        if value.kind in SHOWN:
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
        return _users(region.memory) > len(self._shown[value]) - len(but)

    def _look(self, value: Value, source: Tier) -> None:
        if source is self.tier_of(value):
            self.adopt_replaced(value)

    def _nbytes(self, value: Value) -> int:
        return self.blocks[value.index].nbytes_of(value.kind, value.part)


def _users(memory: torch.Tensor) -> int:
    """Tensors over the same bytes besides ``memory`` and the whole that it was cut from."""
    storage = memory.untyped_storage()
    ours = 2 + (memory._base is not None)  # ``storage`` counts too
    return int(torch._C._storage_Use_Count(storage._cdata)) - ours
