"""`ShardCopies`: copies of blocks that are divided among ranks: shards, and on the device what is gathered of them."""

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.autograd.graph import increment_version

from tapestream.errors import InputError
from tapestream.executor.away import Away, bring_back, send_away
from tapestream.executor.copies import BlockCopies, check_alike
from tapestream.executor.engines.protocol import CopyEngine, Ticket
from tapestream.executor.sharing import Arrival, Shards
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.layout import in_memory_order
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region


class ShardCopies(BlockCopies):
    """A copy on the device is whole, gathered from all ranks; one in any other tier is this rank's shard. Parameters
    show the whole or, elsewhere, nothing but how they look: ``away`` knows who reads them then. See `Holder`."""

    def __init__(
        self, pool: Pool, engine: CopyEngine, blocks: Sequence[ParameterBlock], home: HomeTiers, device: torch.device,
        shards: Shards,
    ) -> None:  # fmt: skip
        super().__init__(pool, engine, blocks, home, device, shards)
        self.others, self.away = shards, Away()

    def _copy(self, here: Region, there: Region, target: Tier) -> Ticket | Arrival:
        if target is Tier.DEVICE:
            return self.used_by(lambda: self.others.gather(here.memory, there.memory), here, there)
        return super()._copy(here, there, target)

    def used_by(self, begin: Callable[[], Arrival], *regions: Region) -> Arrival:
        """What ``begin()`` begins, which reads or writes regions as compute does that is issued now. Released regions
        must not linger beside the memory that it takes."""
        self.pool.trim()
        self.engine.compute_begins(regions)
        return _Using(begin(), self.engine, regions)

    def show(self, value: Value, tier: Tier) -> None:
        """See `BlockCopies`."""
        block = self.blocks[value.index]
        if tier is Tier.DEVICE:
            self.adopt_replaced(value)
            for i in self._numbers(value):
                bring_back(block.parameters[i])
            super().show(value, tier)
        else:
            self.adopt_replaced(value)
            shown = {i: send_away(block.parameters[i], self, value, i) for i in self._numbers(value)}
            self._shown[value] = {i: stand_in.data_ptr() for i, stand_in in shown.items()}

    def write(self, value: Value, tier: Tier, tensors: Mapping[int, torch.Tensor]) -> None:
        """See `BlockCopies`."""
        if tier is Tier.DEVICE:
            super().write(value, tier, tensors)
            return
        with torch.no_grad():
            self.blocks[value.index].take_own(self._to_write(value, tier), tensors, value.kind)

    def replace(self, value: Value, numbers: Sequence[int]) -> None:
        """Take over this rank's part of what users have put into parameters, on every rank."""
        if not numbers:
            return
        parameters = self.blocks[value.index].parameters
        for number in numbers:
            check_alike(parameters[number], self.away.looks(value, number))
        with torch._C.DisableTorchFunctionSubclass():
            given = {number: parameters[number].data for number in numbers}
        self.check_same("came to take over what p.data was set to", value, given)
        for tier in [tier for tier in Tier if self.has(value, tier) and (value, tier) not in self.tickets]:
            self.write(value, tier, given)
        for number in numbers:
            increment_version(parameters[number])
            self._shown[value][number] = send_away(parameters[number], self, value, number).data_ptr()

    def take_back(self, value: Value) -> None:
        """See `BlockCopies`."""
        whole = self.region(value, Tier.DEVICE).memory
        self.keep_part(value, self.blocks[value.index].views(whole, value.kind))

    def keep_part(self, value: Value, tensors: Mapping[int, torch.Tensor]) -> None:
        """Keep what belongs to this rank of whole tensors, where its shard lives; every rank must bring the same."""
        self.adopt_replaced(value)
        self.check_same("came to write what is divided among ranks", value, tensors)
        self.write(value, self.tier_of(value), tensors)

    def check_same(self, what: str, value: Value, tensors: Mapping[int, torch.Tensor]) -> None:
        """Raise InputError, on every rank, where ranks write different numbers, or one of them does alone."""
        sums = [[number, checksum(tensor)] for number, tensor in tensors.items()]
        self.others.meet(what, [value.kind.value, value.index, sums])

    def age(self, value: Value, number: int) -> int:
        """Parameters are never others."""
        return 0

    def part_of(self, value: Value, number: int, whole: torch.Tensor) -> torch.Tensor:
        """See `Holder`. Raises InputError for a tensor of another shape."""
        block = self.blocks[value.index]
        shape = block.parameters[number].shape
        if whole.shape != shape:
            raise InputError(
                f"a tensor of {list(whole.shape)} was to change a gradient of {list(shape)} that is divided among "
                "ranks, number by number; expand() it to that shape, or do so inside of ts.whole(model)"
            )
        start, stop = block.own_elements(value.kind)[number]
        return in_memory_order(whole, block.strides[number])[start:stop]

    def own(self, value: Value, number: int) -> torch.Tensor:
        """What this rank has of a parameter, where its shard lives."""
        return self.blocks[value.index].own(self._to_write(value, self.tier_of(value)), value.kind)[number]

    def whole(self, value: Value) -> dict[int, torch.Tensor]:
        """Whole tensors by number, in memory of their own; every rank must ask."""
        memory = self.gathered(value, "came to read what is divided among ranks")
        return self.blocks[value.index].views(memory, value.kind)

    def gathered(self, value: Value, what: str) -> torch.Tensor:
        """The bytes of all ranks, on the host; every rank must ask, and say ``what`` for."""
        self.adopt_replaced(value)
        there = self.has(value, self.near)
        if not there:
            self.copy_now(value, self.home_of(value), self.near)
        self.others.meet(what, [value.kind.value, value.index])
        whole = torch.empty(self.nbytes_in(value, Tier.DEVICE), dtype=torch.uint8, device=self.device)
        self.others.gather(self.region(value, self.near).memory, whole).wait()
        if not there:
            self.release(value, self.near)
        return whole.cpu()

    def any_of(self, found: torch.Tensor) -> None:
        """See `Holder`."""
        self.others.meet("came to gradients that may be no numbers", 0)
        self.others.largest(found)

    def gather_now(self, value: Value) -> None:
        """Bring the whole to the device, beside a shard that is there."""
        self.others.meet("came to a block that no plan brings", [value.kind.value, value.index])
        self.start(value, self.near, Tier.DEVICE)
        self.wait(value, Tier.DEVICE)

    def show_gathered(self, value: Value) -> None:
        """Let the Parameter objects be whole, in memory of their own; every rank must come."""
        self.adopt_replaced(value)
        views, block = self.whole(value), self.blocks[value.index]
        for i in views:
            bring_back(block.parameters[i])
        block.show(views)
        self._shown.pop(value, None)

    def _numbers(self, value: Value) -> tuple[int, ...]:
        block = self.blocks[value.index]
        return block.frozen if value.kind is Kind.BUFFERS else block.trained


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _Using:
    """Something that comes from other ranks, and the regions that it uses until then."""

    def __init__(self, arrival: Arrival, engine: CopyEngine, regions: Sequence[Region]) -> None:
        self._arrival, self._engine, self._regions = arrival, engine, regions

    def wait(self) -> None:
        """See `Arrival`."""
        self._arrival.wait()
        self._engine.compute_ended(self._regions)
