"""`Homes`: the storage of one streamed model, from adopting its blocks to giving everything back."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import nn

from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget, Machine
from tapestream.errors import BudgetError, InputError, StorageError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.engines import make_engine
from tapestream.frontends.available import host_limit, host_nbytes, ranks_here
from tapestream.frontends.below import Below
from tapestream.frontends.module.homes.adopt import check_own_bytes, mark, parameter_groups, parameters_of, unmark
from tapestream.frontends.module.homes.real import Maker
from tapestream.frontends.module.homes.tables import Tables
from tapestream.frontends.module.homes.weights import Source, Weights
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.ir.homes import HomeTiers
from tapestream.peers.agreement import Agreement
from tapestream.peers.divided import DividedBlocks
from tapestream.planning.measure import measure_machine
from tapestream.storage.blocks import ParameterBlock, Share
from tapestream.storage.disk import DiskFolder
from tapestream.storage.heap import free_at_once, keep_freed, scarce
from tapestream.storage.layout import unit_nbytes
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region
from tapestream.units import format_nbytes

_PARAMETERS = "the parameters of the blocks"
_IN_FLIGHT = 2  # blocks for which the host keeps room, where some pass it on their way from the disk


class Homes:
    """The folder, the pool, the copy engine and the store of a model's blocks.

    Making it brings everything outside blocks to ``device``, then block by block home: one block more than the homes
    is ever held.
    When that fails the parameters are where they were, and the folder is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        wide: Sequence[nn.Module],
        *,
        device: torch.device,
        budget: Budget,
        home: HomeTiers,
        folder: str | os.PathLike[str] | None,
        engine: str,
        weights: Source | None,
        progress: Callable[[str, int, int], None],
        tables: Sequence[nn.Embedding] = (),
        agreement: Agreement | None = None,
        among: int = 1,
    ) -> None:
        self._path, self._budget, self._agreement = folder, budget, agreement
        self._host_nbytes = _host_nbytes(budget, agreement)
        self.shards = None if agreement is None or among == 1 else DividedBlocks(agreement, device, among)
        self._counted: tuple[Counter[tuple[Tier, Tier]], float] = (Counter(), 0.0)
        self._speeds: Future[Machine] | None = None
        with ExitStack() as undo:
            undo.callback(keep_freed)
            free_at_once()
            groups, uses = parameter_groups(model, blocks, wide)
            saved = self._opened(weights, model, blocks)
            blocks = [*blocks, *wide]
            check_own_bytes(model, blocks)
            maker = Maker(model, [*blocks, *tables], saved)
            self.engine = make_engine(engine, device)
            undo.callback(self.engine.close)
            self._folder = None if folder is None else DiskFolder(folder)
            self.pool = self._pool(device, undo)
            # States have memory and lanes of their own: what one engine still reads must not be given to another.
            self.states = Below(
                device, home="auto", folder=folder, budget=budget, machine=None, engine=engine, beside=self.pool
            )
            undo.callback(self.states.close)
            self.tables = Tables(tables, self.pool, device)
            undo.callback(self.tables.close)
            self._adopt_tables(maker)
            unit = unit_nbytes(moves=home[Kind.PARAMETERS] is not Tier.DEVICE)
            below = self._check_room(home, groups, blocks, unit)
            maker.outside(device, reads=self._reads(0))
            self._let_be_same(parts_outside(model, [*blocks, *tables]), maker, device)
            self.store = BlockStore(self.pool, self.engine, blocks, uses, home, device, self.shards)
            self.store.copies.on_disk = below
            undo.callback(self._disown)
            for number, members in enumerate(groups):
                self._adopt(number, [blocks[position] for position in members], maker, unit)
                progress("moving blocks home", number + 1, len(groups))
            for module in (blocks[position] for position, use in enumerate(uses) if use is None):
                maker.block(module, device, reads=self._reads(0))
                self._let_be_same(module.modules(), maker, device)
            maker.tell()
            self._mark(undo)
            if not _lean(device, home, budget):
                keep_freed((budget.device_nbytes or 0) if not is_accelerator(device) else 0)
            self._undo = undo.pop_all()

    def _pool(self, device: torch.device, undo: ExitStack) -> Pool:
        if self._folder is not None:
            undo.callback(self._folder.close)
        limits = {Tier.DEVICE: None, Tier.HOST: self._host_nbytes, Tier.DISK: self._budget.disk_nbytes}
        pool = Pool(device, folder=self._folder, limits=limits, pin=is_accelerator(device))
        undo.callback(pool.close)
        return pool

    def _mark(self, undo: ExitStack) -> None:
        for owned in (*(block.parameters for block in self.store.blocks), self.tables.parameters):
            mark(owned)
            undo.callback(unmark, owned)

    def _adopt(self, number: int, modules: Sequence[nn.Module], maker: Maker, unit: int) -> None:
        for module in modules:
            maker.block(module, self.store.device, reads=self._reads(number))
        inside = [m for module in modules for m in module.modules()]
        self._let_be_same(inside, maker, self.store.device, number)
        self.store.adopt(ParameterBlock(number, parameters_of(modules), unit=unit, share=self._share))

    @property
    def _share(self) -> Share:
        return Share() if self.shards is None else self.shards.share

    def _opened(self, source: Source | None, model: nn.Module, blocks: Sequence[nn.Module]) -> Weights | None:
        """The weights to be read. Where a rank cannot open them, or has none, every rank raises InputError."""
        found, failed = None, None
        try:
            found = None if source is None else Weights(source, model, blocks)
        except (InputError, StorageError) as error:
            failed = error
        if self._agreement is not None:
            mine = "gave no weights=" if source is None else "gave weights="
            every = self._agreement.told("opened weights", mine if failed is None else f"could not read them: {failed}")
            if failed is None and len(set(every)) > 1:
                said = ", ".join(f"rank {rank} {one}" for rank, one in enumerate(every))
                raise InputError(f"{said}; every rank must give weights=, or none, that it can read")
        if failed is not None:
            raise failed
        return found

    def _reads(self, number: int) -> bool:
        """Whether this rank reads what the weights hold of a part of this ``number``: each reads 1/N, and sends it to
        the others."""
        return self._agreement is None or self._agreement.rank == number % self._agreement.size

    def _let_be_same(self, modules: Iterable[nn.Module], maker: Maker, device: torch.device, number: int = 0) -> None:
        """What these hold is, on all ranks, that of the one that has read it, or, where it was not read, of the first
        one."""
        if self._agreement is None:
            return
        read, others = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    (read if maker.holds(module, name) else others)[id(tensor)] = tensor
        self._agreement.same([t for key, t in others.items() if key not in read], device)
        self._agreement.same(read.values(), device, number % self._agreement.size)

    def _adopt_tables(self, maker: Maker) -> None:
        for table in self.tables.modules:
            maker.block(table, self.tables.device)
            self.tables.adopt(table, self.tables.tier(table, disk=self._folder is not None))
        self._host_nbytes -= self.tables.nbytes(Tier.HOST)  # for blocks

    def limited(self, budget: Budget, kept_nbytes: int = 0) -> Budget:
        """``budget`` with what the host may hold beside tables, and ``kept_nbytes`` of optimizer state for them, where
        it says that, or what finds no room there goes to the disk."""
        if (budget.host_nbytes is None or not self.tables.modules) and (
            budget.host_nbytes is not None or not self.store.homes.overflowing
        ):
            return budget
        host = self._host_nbytes - kept_nbytes
        if host < 1:
            raise BudgetError(
                f"tables and what the optimizer keeps for them take {1 - host} bytes more of RAM than is allowed; "
                "allow so much more, and room for blocks (Budget(host=...)), or name fewer tables"
            )
        return Budget(budget.device_nbytes, host=host, disk=budget.disk_nbytes, calls=budget.calls)

    @property
    def folder(self) -> DiskFolder | None:
        """This run's own folder."""
        return self._folder

    def check_room_for_updates(self, budget: Budget, gradients: bool) -> None:
        """Raise StorageError where the disk cannot hold the optimizer's state, nor the ``gradients`` that are sent
        home, even if as much as the ``budget`` allows stays on the device."""
        kinds = (Kind.OPTIMIZER_STATE, Kind.GRADIENT) if gradients else (Kind.OPTIMIZER_STATE,)
        homes, room = self.store.homes, budget.device_nbytes or 0
        total = sum(
            block.shard_nbytes_of(kind, part)
            for kind in kinds
            if homes[kind] is Tier.DISK or kind in homes.overflowing
            for block in self.store.blocks
            if block.trainable
            for part in range(block.updates if kind is Kind.OPTIMIZER_STATE else 1)
        )
        if homes.overflowing:
            room += max(0, self.pool.room_nbytes(Tier.HOST) or 0)
        if self._folder is not None:
            self._folder.check_room(total - room, "gradients and the optimizer's state")

    def reserve(self, values: Iterable[Value]) -> None:
        """See that the disk has room for these, so that no step finds it full: bytes that are not there yet are
        reserved, and wait in the pool. Raises BudgetError or StorageError that says what all of them take."""
        sizes = {value: self.store.copies.nbytes_in(value, Tier.DISK) for value in values}
        missing = [n for value, n in sizes.items() if n and not self.store.copies.has(value, Tier.DISK)]
        missing.sort(reverse=True)  # small ones fit between large ones
        regions: list[Region] = []
        try:
            regions.extend(self.pool.allocate(Tier.DISK, nbytes) for nbytes in missing)
        except (BudgetError, StorageError) as error:
            total, left = sum(sizes.values()), sum(missing[len(regions) :])
            raise type(error)(
                f"a step keeps {format_nbytes(total)} ({total} bytes) of the blocks' parameters, gradients and "
                f"optimizer state on disk, and the last {left} bytes do not fit: {error}"
            ) from error
        finally:
            for region in regions:
                self.pool.release(region)
            if len(regions) < len(missing):
                self.pool.trim(Tier.DISK)

    def begin_measuring(self, *, wanted: bool) -> None:
        """Where ``wanted``, let `measured` find its answer beside what is done until then: a disk is busy, hardly a
        processor. Not on a GPU, of which profiling counts the bytes."""
        beside = self._speeds is None and not is_accelerator(self.store.device)
        if wanted and beside and self.store.home is not self.store.copies.near:
            thread = ThreadPoolExecutor(1, "tapestream-speeds")
            self._speeds = thread.submit(self._measure)
            thread.shutdown(wait=False)

    def measured(self) -> Machine:
        """Speeds of the links that blocks pass. The first step waits for it."""
        speeds, self._speeds = self._speeds, None
        return self._measure() if speeds is None else speeds.result()

    def _measure(self) -> Machine:
        if self.store.home is self.store.copies.near:
            return Machine()
        folder = self._path if self.store.homes.use(Tier.DISK) else None
        device, within = self.store.device, self._budget.device_nbytes
        room = None if within is None or not is_accelerator(device) else within // 4
        return measure_machine(device, folder, quick=True, within_nbytes=room)

    def statistics_since(self) -> tuple[dict[tuple[Tier, Tier], int], float]:
        """Bytes moved per lane and seconds waited since the last call of this."""
        moved, waited = Counter[tuple[Tier, Tier]](), 0.0
        others = () if self.shards is None else (self.shards,)
        for now in (self.engine.statistics(), self.states.statistics(), *others):
            moved.update(now.bytes_moved)
            waited += now.wait_seconds
        (before, waited_before), self._counted = self._counted, (moved, waited)
        return {lane: n - before[lane] for lane, n in moved.items()}, waited - waited_before

    def close(self) -> None:
        """Give every block memory of its own again and remove the files."""
        self.store.copies.on_host.close()
        self._undo.close()

    def _check_room(
        self, home: HomeTiers, groups: Sequence[Sequence[int]], blocks: Sequence[nn.Module], unit: int
    ) -> frozenset[Value]:
        """Raise BudgetError or StorageError where the blocks' parameters find no room at home, before any moves.
        Returns those that go to the disk because the host has none."""
        tier = home[Kind.PARAMETERS]
        inside = [parameters_of([blocks[position] for position in members]) for members in groups]
        if tier is Tier.DEVICE or not inside:
            return frozenset()
        laid_out = [ParameterBlock(number, found, unit=unit, share=self._share) for number, found in enumerate(inside)]
        sizes = {Value(kind, b.index): b.shard_nbytes_of(kind) for b in laid_out for kind in b.kinds}
        below = dict[Value, int]()
        if Kind.PARAMETERS in home.overflowing:
            largest = max(sizes.values())
            if self._host_nbytes < largest:
                raise BudgetError(
                    f"blocks pass RAM on their way to the disk, and the largest takes {format_nbytes(largest)} "
                    f"({largest} bytes), where {self._host_nbytes} bytes are allowed; allow more (Budget(host=...))"
                )
            room = self._host_nbytes - _IN_FLIGHT * largest
            for value, nbytes in sizes.items():
                room -= nbytes
                if room < 0:
                    below[value] = nbytes
        if self._folder is not None:
            on_disk = sizes if tier is Tier.DISK else below
            self._folder.check_room(sum(on_disk.values()), _PARAMETERS)
        self.pool.check_room(tier, (n for value, n in sizes.items() if value not in below), _PARAMETERS)
        return frozenset(below)

    def _disown(self) -> None:
        for block in self.store.blocks:
            self.store.disown(block.index)


def _host_nbytes(budget: Budget, agreement: Agreement | None) -> int:
    """What the host may hold: of several ranks, the least of any, whose plans may be one."""
    if agreement is None:
        return host_limit(budget, 1)
    return agreement.least("looked at its memory", host_limit(budget, ranks_here()))


def parts_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a model that are in no block."""
    inside = {id(m) for block in blocks for m in block.modules()}
    return [m for m in model.modules() if id(m) not in inside]


def _lean(device: torch.device, home: HomeTiers, budget: Budget) -> bool:
    """Whether what is freed in RAM goes back to the system at once in training, too."""
    below = not is_accelerator(device) and home.use(Tier.DISK)
    return below and scarce(budget.device_nbytes, host_nbytes())
