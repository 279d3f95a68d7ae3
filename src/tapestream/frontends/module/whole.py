"""`whole`: reading a model whose blocks are divided among ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tapestream.executor.shard_book import ShardBook
from tapestream.executor.shard_copies import ShardCopies
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.module.streamed import Streamed
from tapestream.ir.actions import Kind, Value
from tapestream.optim.shown import StateInParts, read_when_asked


class Gathered:
    """Whole tensors of a model whose blocks are divided, those of one block at a time: of the last one that was asked
    for, which need not come again while nothing has changed them."""

    def __init__(self, copies: ShardCopies, gradients: ShardBook) -> None:
        self._copies, self._gradients = copies, gradients
        self._last: tuple[Value, int, dict[int, torch.Tensor]] | None = None
        self._later: dict[tuple[Value, int], StateInParts] = {}

    def read(self, value: Value, number: int) -> torch.Tensor:
        """One tensor, in memory of its own, which is a parameter's or a gradient's; every rank must ask."""
        if value.kind is Kind.GRADIENT:
            return self._gradients.whole(value)[number]
        version = sum(p._version for p in self._copies.blocks[value.index].parameters)
        if self._last is None or self._last[:2] != (value, version):
            self._last = None  # before others come
            self._last = value, version, self._copies.whole(value)
        return self._last[2][number]

    def later(self, value: Value, number: int) -> torch.Tensor:
        """The same, as a tensor that comes when it is read; every rank must read it then."""
        if (value, number) not in self._later:
            parameter = self._copies.blocks[value.index].parameters[number]
            made = read_when_asked(parameter.shape, parameter.dtype, lambda: self.read(value, number))
            self._later[value, number] = made
        return self._later[value, number]


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
    with copies.away.read_by(way(Gathered(copies, gradients))):
        yield
