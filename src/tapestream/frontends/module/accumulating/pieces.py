"""`Pieces`: the graphs between blocks, which are differentiated one by one.

The graph of a micro-batch ends at every block: what comes out of one is a `Cut`, where gradients are caught. What lies
between two blocks is a piece. Plain PyTorch differentiates nodes in the reverse order in which they were made, and so
do pieces in their reverse order, as long as nothing is a part of two of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node

from tapestream.units import format_nbytes

Caught: TypeAlias = Callable[[Sequence[torch.Tensor | None]], None]
_AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_CAST = "ToCopyBackward0"  # of a weight, which autocast makes once for all micro-batches; it saves nothing


class Unfit(Exception):
    """These micro-batches cannot pass the blocks together with the bits of plain PyTorch. The message says why."""


class DrawsUnknown(Unfit):
    """They draw random numbers, and nobody knows yet how many."""


class ApartUnknown(Unfit):
    """Gradients of ``nbytes`` outside of the blocks are made for each of them apart, which no plan counts yet."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"gradients of {format_nbytes(nbytes)} are made for each of them apart")
        self.nbytes = nbytes


class Cut(torch.autograd.Function):
    """What a block has returned, for the user's code behind it."""

    @staticmethod
    def forward(ctx: Any, caught: Caught, root: torch.Tensor, requires: Sequence[bool], *tensors: torch.Tensor) -> Any:
        """``tensors`` as new ones over the same bytes; ``caught`` gets their gradients."""
        ctx.set_materialize_grads(False)
        ctx.caught = caught
        made = tuple(t.detach() for t in tensors)
        ctx.mark_non_differentiable(*(t for t, one in zip(made, requires, strict=True) if not one))
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """The graph ends here."""
        ctx.caught(cotangents)
        return (None, None, None, *(None for _ in cotangents))


@dataclass(slots=True)
class Uses:
    """How one micro-batch uses a leaf. ``pieces``: in which, in the order of the forward; ``count``: how often in the
    last of them; ``casts``: how many uses are of a cast that autocast has made."""

    pieces: list[int] = field(default_factory=list)
    count: int = 0
    casts: int = 0


@dataclass(slots=True)
class Pieces:
    """Of all micro-batches. ``inside``: ids of parameters whose gradients blocks make. ``leaves``: by id, those that
    pieces give gradients to; ``apart``: those of them that several pieces of a micro-batch do (tied weights).

    Plain PyTorch adds up what the uses of a leaf give in one backward, last use first, and adds that sum to ``.grad``.
    Sums of pieces give the same bits where all uses of a micro-batch but those of its last piece come alone, and where
    micro-batches are done with a leaf in one piece.
    """

    inside: frozenset[int]
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)
    apart: dict[int, torch.Tensor] = field(default_factory=dict)
    _cuts: dict[Node, tuple[int, int]] = field(default_factory=dict)  # micro-batch, number of the block call
    _owners: dict[Node, tuple[int, int]] = field(default_factory=dict)  # micro-batch, piece
    _reached: dict[tuple[int, int, int], int] = field(default_factory=dict)  # micro-batch, block call, output: piece
    _uses: dict[tuple[int, int], Uses] = field(default_factory=dict)  # micro-batch, id of a leaf
    _first: dict[int, int] = field(default_factory=dict)  # by id of a leaf: the piece that uses it first
    _given: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)  # of a cut: entries of the next block

    def cut(self, micro: int, call: int, outputs: Sequence[torch.Tensor]) -> None:
        """``outputs`` are those of the `Cut` behind a block call."""
        node = next((t.grad_fn for t in outputs if t.grad_fn is not None), None)
        if node is not None:
            self._cuts[node] = micro, call

    def linked(self, micro: int, call: int, entries: frozenset[int]) -> None:
        """The next block has been given these outputs of ``call`` as they are."""
        self._given[micro, call] = entries

    def add(self, micro: int, piece: int, roots: Sequence[torch.Tensor]) -> None:
        """All behind ``roots``, up to cuts, is differentiated together. Raises Unfit where something else is there."""
        edges = [(t.grad_fn, t.output_nr) for t in roots if t.grad_fn is not None]
        for leaf in (t for t in roots if t.requires_grad and t.grad_fn is None):
            self._reach_leaf(micro, piece, leaf, cast=False)
        entered = set[Node]()
        while edges:
            node, number = edges.pop()
            if node in self._cuts:
                self._reach_cut(micro, piece, *self._cuts[node], number)
            elif node not in entered and not isinstance(node, _AccumulateGrad):
                entered.add(node)
                self._own(micro, piece, node)
                for used, n in node.next_functions:
                    if isinstance(used, _AccumulateGrad):
                        self._reach_leaf(micro, piece, used.variable, cast=node.name() == _CAST)
                    elif used is not None:
                        edges.append((used, n))

    def several(self, micro: int) -> list[torch.Tensor]:
        """Leaves that several pieces of a micro-batch give gradients to."""
        return [leaf for key, leaf in self.apart.items() if len(self._uses_of(micro, key).pieces) > 1]

    def done_in(self, leaf: torch.Tensor) -> int:
        """The piece whose backward is the last to give a gradient to a leaf."""
        return self._first[id(leaf)]

    def _uses_of(self, micro: int, key: int) -> Uses:
        return self._uses.setdefault((micro, key), Uses())

    def _own(self, micro: int, piece: int, node: Node) -> None:
        owner = self._owners.setdefault(node, (micro, piece))
        if owner == (micro, piece) or (owner[0] != micro and node.name() == _CAST):
            return
        if owner[0] == micro:
            raise Unfit("something that is made outside of the blocks is used at several places between them")
        raise Unfit("one micro-batch uses what the forward of another has made")

    def _reach_cut(self, micro: int, piece: int, owner: int, call: int, number: int) -> None:
        if owner != micro:
            raise Unfit("one micro-batch uses what the forward of another has made")
        if number in self._given.get((micro, call), ()):
            raise Unfit("what a block returns is used by the next one and by code outside of the blocks")
        if self._reached.setdefault((micro, call, number), piece) != piece:
            raise Unfit("what a block returns is used at several places behind it")

    def _reach_leaf(self, micro: int, piece: int, leaf: torch.Tensor, *, cast: bool) -> None:
        if id(leaf) in self.inside:
            raise Unfit("code outside of the blocks uses a parameter of theirs")
        if id(leaf) not in self.leaves:
            if leaf.grad is not None:
                raise Unfit("gradients of an earlier backward are there; call zero_grad() before")
            self.leaves[id(leaf)] = leaf
        uses = self._uses_of(micro, id(leaf))
        if not uses.pieces and self._first.setdefault(id(leaf), piece) != piece:
            raise Unfit("micro-batches use a parameter outside of the blocks at other places than each other")
        if uses.pieces[-1:] != [piece]:
            if uses.count > 1:
                raise Unfit("a parameter outside of the blocks is used several times, at several places between them")
            uses.pieces.append(piece)
            uses.count = 0
        uses.count, uses.casts = uses.count + 1, uses.casts + cast
        if uses.casts > 1 or (uses.casts and len(uses.pieces) - 1 + uses.count > 2):
            raise Unfit("autocast casts a parameter outside of the blocks for some of several uses")
        if len(uses.pieces) > 1:
            self.apart[id(leaf)] = leaf
