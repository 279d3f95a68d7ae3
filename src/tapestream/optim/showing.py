"""`Showing`: the optimizer's state as users see it, in ``optimizer.state`` and in state dicts."""

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from tapestream.executor.blocks import BlockStore
from tapestream.executor.shard_copies import checksum
from tapestream.ir.actions import Kind, Value
from tapestream.optim.shown import StateInParts
from tapestream.storage.blocks import ParameterBlock, Piece


class Showing:
    """Finds the state of each parameter in the parts of its block. ``scalars``: by ``id`` of a parameter, what is not
    streamed."""

    def __init__(self, store: BlockStore, scalars: Mapping[int, dict[str, Any]]) -> None:
        self._store, self._scalars, self._shards = store, scalars, store.copies.shards
        self._shown: dict[torch.Tensor, tuple[object, object]] = {}
        # By id of a parameter: its block, and the part and number there of each of its pieces.
        self._where: dict[int, tuple[ParameterBlock, list[tuple[int, int]]]] = {}
        for block in store.blocks:
            self.follow(block)

    def follow(self, block: ParameterBlock) -> None:
        """Take note of the block's parts."""
        for parameter in block.parameters:
            self._where.pop(id(parameter), None)
            self._shown.pop(parameter, None)
        for part, found in enumerate(block.state_parts):
            for number, piece in enumerate(found.pieces):
                where = self._where.setdefault(id(block.parameters[piece.number]), (block, []))
                where[1].append((part, number))

    def forget(self) -> None:
        """The state was replaced."""
        self._shown.clear()

    def pieces_of(self, parameter: torch.Tensor) -> Sequence[Piece]:
        """The pieces in which a parameter is updated; none for one outside the blocks."""
        block, where = self._where.get(id(parameter), (None, []))
        return [block.state_parts[part].pieces[number] for part, number in where] if block is not None else []

    def show(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        """Bring ``optimizer.state`` up to date."""
        for block in self._store.blocks:
            views = [self._views(block, part) for part in range(len(block.state_parts))]
            for parameter in block.parameters:
                scalars, (_, where) = self._scalars.get(id(parameter)), self._where.get(id(parameter), (None, []))
                if scalars is None or not where:
                    continue
                source = views[where[0][0]] if len(where) == 1 and self._shards is None else self
                shown = self._shown.get(parameter)
                if not shown or not state.get(parameter) or shown[0] is not scalars or shown[1] is not source:
                    state[parameter] = {**scalars, **self._tensors(parameter, views)}
                    self._shown[parameter] = scalars, source

    def saved(self, block: ParameterBlock) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies of all the state that a block has in its parts."""
        views = [self._views(block, part) for part in range(len(block.state_parts))]
        made = [p for p in block.parameters if id(p) in self._scalars and id(p) in self._where]
        return {p: {name: self._copied(value) for name, value in self._tensors(p, views).items()} for p in made}

    def written(self, parameter: torch.Tensor, found: Mapping[str, Any]) -> dict[str, Any]:
        """Copy what has a place in the parts into it; returns copies of the rest."""
        block, where = self._where[id(parameter)]
        if self._shards is not None:  # each takes its part of what must be the same
            sums = {name: checksum(value) for name, value in found.items() if isinstance(value, torch.Tensor)}
            self._shards.meet("came to write an optimizer's state", [block.index, sorted(sums.items())])
        names: set[str] = set()
        for part, number in where:
            piece = block.state_parts[part].pieces[number]
            for name, view in self._slots(block, part, number).items():
                if name in found:
                    view.copy_(piece.of(found[name], block.strides[piece.number]))
                names.add(name)
        return {name: copy.deepcopy(value) for name, value in found.items() if name not in names}

    def whole(self, value: Any) -> Any:
        """``value``, or a copy of it where it lies in parts: on disk, if that is where the state lives."""
        return self._copied(value) if isinstance(value, StateInParts) else value

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        flat = self._store.beside(Kind.OPTIMIZER_STATE, value.nbytes)[: value.nbytes].view(value.dtype)
        return value.whole_in(flat) if isinstance(value, StateInParts) else flat.view(value.shape).copy_(value)

    def _tensors(self, parameter: torch.Tensor, views: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The parameter's state by name. ``views``: of each part of its block, empty where nothing was made yet."""
        block, where = self._where[id(parameter)]
        part, number = where[0]
        slots = zip(block.state_parts[part].slots, views[part], strict=False)
        found = {name: view for (at, name), view in slots if at == number}
        if len(where) == 1 and self._shards is None:
            return found
        return {name: self._in_parts(parameter, name, view.dtype) for name, view in found.items()}

    def _in_parts(self, parameter: torch.Tensor, name: str, dtype: torch.dtype) -> StateInParts:
        block, where = self._where[id(parameter)]
        pieces = self.pieces_of(parameter)

        def places() -> list[tuple[slice, torch.Tensor]]:
            return [
                (slice(piece.start, piece.stop), self._slots(block, *place)[name])
                for piece, place in zip(pieces, where, strict=True)
            ]

        stride = block.strides[pieces[0].number]
        if self._shards is None:
            return StateInParts.over(parameter.shape, stride, dtype, places)
        return StateInParts.over(parameter.shape, stride, dtype, places, partial(self._complete, block.index, name))

    def _complete(self, block: int, name: str, flat: torch.Tensor) -> None:
        """Let what other ranks have of one tensor of state come to where it is missing; every rank must read it."""
        assert self._shards is not None
        self._shards.meet(f"came to read {name!r} of an optimizer's state", block)
        self._shards.complete(flat)

    def _slots(self, block: ParameterBlock, part: int, number: int) -> dict[str, torch.Tensor]:
        """The state of one piece, where it lives."""
        slots = block.state_parts[part].slots
        return {name: v for (at, name), v in zip(slots, self._made_views(block, part), strict=True) if at == number}

    def _made_views(self, block: ParameterBlock, part: int) -> list[torch.Tensor]:
        value = Value(Kind.OPTIMIZER_STATE, block.index, part)
        if not block.state_parts[part].nbytes:  # no state, or that of parameters without elements
            return block.state_parts[part].views(torch.empty(0, dtype=torch.uint8, device=self._store.device))
        return self._store.updates.state_views(block.index, part, self._store.memory_of(value))

    def _views(self, block: ParameterBlock, part: int) -> list[torch.Tensor]:
        """The same of a whole part; nothing where no update has made it yet."""
        value = Value(Kind.OPTIMIZER_STATE, block.index, part)
        made = self._store.exists(value) or not block.state_parts[part].nbytes
        return self._made_views(block, part) if made else []
