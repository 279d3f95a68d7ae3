"""`whole`: reading a model whose blocks are divided among ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tapestream.executor.block_regions import users_of
from tapestream.executor.shard_book import ShardBook
from tapestream.executor.shard_copies import ShardCopies, checksum
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.module.streamed import Streamed
from tapestream.ir.actions import Kind, Value
from tapestream.optim.shown import StateInParts, read_when_asked


class Gathered:
    """Whole tensors of a model whose blocks are divided, those of one block at a time: of the last one that was asked
    for, which need not come again while nothing has changed it. What users write into them, and into views of them,
    is kept when the next one comes, or at the `end`; every rank must have written the same."""

    def __init__(self, copies: ShardCopies, gradients: ShardBook) -> None:
        self._copies, self._gradients = copies, gradients
        self._last: tuple[Value, int] | None = None
        self._memory = torch.empty(0, device="cpu")
        self._crc32 = 0
        self._held: list[tuple[Value, int, torch.Tensor, int]] = []  # before it, that users still have views of
        self._later: dict[tuple[Value, int], StateInParts] = {}

    def read(self, value: Value, number: int) -> torch.Tensor:
        """One tensor, in memory of its own, which is a parameter's or a gradient's; every rank must ask."""
        if self._last != (value, self._version(value)):
            self._leave()
            self._memory = self._copies.gathered(value, "came to read what is divided among ranks")
            self._last, self._crc32 = (value, self._version(value)), checksum(self._memory)
        return self._copies.blocks[value.index].views(self._memory, value.kind)[number]

    def later(self, value: Value, number: int) -> torch.Tensor:
        """The same, as a tensor that comes when it is read; every rank must read it then."""
        if (value, number) not in self._later:
            parameter = self._copies.blocks[value.index].parameters[number]
            made = read_when_asked(parameter.shape, parameter.dtype, lambda: self.read(value, number))
            self._later[value, number] = made
        return self._later[value, number]

    def end(self) -> None:
        """Nothing is read any more; every rank must come."""
        self._leave()
        self._look_at_held(lambda memory: True)

    def _leave(self) -> None:
        """Another block comes: what was written is kept, and what users still have is looked at again later."""
        if self._last is not None:
            crc32 = self._keep_written(*self._last, self._memory, self._crc32)
            self._held.append((*self._last, self._memory, crc32))
            self._last, self._memory = None, torch.empty(0, device="cpu")
        self._look_at_held(lambda memory: users_of(memory) == 0)

    def _look_at_held(self, goes: Callable[[torch.Tensor], bool]) -> None:
        held, self._held = self._held, []
        while held:
            value, version, memory, crc32 = held.pop(0)
            if goes(memory):
                self._keep_written(value, version, memory, crc32)
            else:
                self._held.append((value, version, memory, crc32))

    def _keep_written(self, value: Value, version: int, memory: torch.Tensor, crc32: int) -> int:
        """Keep what is in ``memory`` if it is not as it came, and nothing else has changed the value since. Returns its
        checksum."""
        now = checksum(memory)
        if now != crc32 and version == self._version(value):
            self._copies.keep_part(value, self._copies.blocks[value.index].views(memory, value.kind))
            self._gradients.forget_whole()
        return now

    def _version(self, value: Value) -> int:
        if value.kind is Kind.GRADIENT:
            return self._gradients.versions[value.index]
        return sum(p._version for p in self._copies.blocks[value.index].parameters)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Inside, the parameters and gradients of a streamed model whose blocks are divided among ranks
    (``Peers(shard=True)``) are whole where they are read, and what is written into them in place stays: the blocks'
    bytes come from all ranks, one block at a time. ``model.state_dict()`` is that of the whole model then, in RAM.

    Every rank must enter, and read and write the same tensors in the same order; what is written must be the same on
    all. Of other streamed models, parameters can be read anywhere, and nothing changes. Raises InputError for a model
    that is not streamed, or between a forward and its backward; inside, where ranks read different things, on all.
    """
    handle = handle_of(model)
    handle.check_idle("ts.whole()")
    with _read_by(handle, lambda gathered: gathered.read):
        yield


@contextmanager
def read_later(model: nn.Module) -> Iterator[None]:
    """Inside, ``model.state_dict()`` has tensors that come, on all ranks, when they are read."""
    handle = handle_of(model)
    handle.check_idle("saving")
    with _read_by(handle, lambda gathered: gathered.later):
        yield


@contextmanager
def _read_by(handle: Streamed, way: Callable[[Gathered], Callable[[Value, int], torch.Tensor]]) -> Iterator[None]:
    copies, gradients = handle.store.copies, handle.store.gradients
    if not isinstance(copies, ShardCopies) or not isinstance(gradients, ShardBook):
        yield
        return
    gathered = Gathered(copies, gradients)
    with copies.away.read_by(way(gathered)):
        yield
        gathered.end()
