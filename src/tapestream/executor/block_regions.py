"""`BlockRegions`: where every copy of every block value lies, and where it belongs."""

from collections.abc import Sequence

import torch

from tapestream.errors import BudgetError
from tapestream.executor.engines.protocol import CopyEngine
from tapestream.executor.sharing import Shards
from tapestream.ir.actions import Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region


class BlockRegions:
    """Regions of block values by tier.

    ``shards``: who has the other parts of blocks that are divided among ranks; ``near``: where values are updated, and
    live that stay on the device: whole, or this rank's shard of them. ``resident``: values that live there instead of
    at ``home``; ``on_disk``: values whose home is the disk, whatever that of their kind is.
    """

    def __init__(
        self, pool: Pool, engine: CopyEngine, blocks: Sequence[ParameterBlock], home: HomeTiers, shards: Shards | None
    ) -> None:
        self.pool, self.engine, self.blocks, self.shards = pool, engine, blocks, shards
        self.near = Tier.DEVICE if shards is None else Tier.SHARD
        self._homes = home
        self.resident: frozenset[Value] = frozenset()
        self.on_disk: frozenset[Value] = frozenset()
        self._lived: set[Value] = set()  # on the device when users last looked
        self.regions: dict[tuple[Value, Tier], Region] = {}
        self._blank: set[Value] = set()  # places at home that nothing was written to
        self._left: list[Region] = []  # not ours any more, but to be given back to the pool when users have done

    def home_of(self, value: Value, on_disk: frozenset[Value] | None = None) -> Tier:
        """Where a value lives that is not resident; where it would with other values ``on_disk``."""
        if value in (self.on_disk if on_disk is None else on_disk):
            return Tier.DISK
        home = self._homes[value.kind]
        return self.near if home is Tier.DEVICE else home

    def fills_host(self, value: Value) -> bool:
        """Whether a value at home on the host may go to the disk, and others of the model have."""
        return value.kind in self._homes.overflowing and bool(self.on_disk) and self.home_of(value) is Tier.HOST

    def tier_of(self, value: Value) -> Tier:
        """Where a value lives between uses."""
        return self.near if value in self.resident else self.home_of(value)

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
                memory = Tier.DEVICE if tier is Tier.SHARD else tier
                region = self.regions[value, tier] = self.pool.allocate(memory, self.nbytes_in(value, tier))
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
            if room is not None and room < self.nbytes_in(value, Tier.HOST) + passing:
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
        lived = tier is self.near and value in self._lived
        self._lived.discard(value)
        if lived and users_of(region.memory) > 0:
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
        elif users_of(region.memory) > 0:
            self._left.append(self.regions.pop((value, tier)))

    def nbytes_in(self, value: Value, tier: Tier) -> int:
        """Bytes of a copy in ``tier``: only on the device are they whole where blocks are divided among ranks."""
        block = self.blocks[value.index]
        size = block.nbytes_of if tier is Tier.DEVICE else block.shard_nbytes_of
        return size(value.kind, value.part)


def users_of(memory: torch.Tensor) -> int:
    """Tensors over the same bytes besides ``memory`` and the whole that it was cut from."""
    storage = memory.untyped_storage()
    ours = 2 + (memory._base is not None)  # ``storage`` counts too
    return int(torch._C._storage_Use_Count(storage._cdata)) - ours
