"""Which of the tensors that blocks are given something else uses, too, and how much of them is held at once."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch.autograd.graph import Node, get_gradient_edge

from tapestream.runner.graph import edges_behind

Edge: TypeAlias = tuple[Node, int]


class Reused:
    """Tells of an observed call, by its graph, which tensors something else uses than the blocks that were given them.

    That graph ends at each block. ``met``: by edge, the blocks (how many had been called) between which it is held, but
    for what is held within a chain. ``any``: whether there was one.
    """

    def __init__(self) -> None:
        self.any = False
        self.met: dict[Edge, tuple[int, int, int]] = {}
        self._noted: dict[Edge, tuple[int, int]] = {}
        self._seen: set[Node] = set()
        self._blocks = 0

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """A block was given these; with gradients off (inside of a Function), it makes none of them."""
        self._blocks += 1
        made = tensors if torch.is_grad_enabled() else ()
        for edge, nbytes in [(_edge_of(t), t.nbytes) for t in made if t.requires_grad]:
            self._noted.setdefault(edge, (self._blocks, nbytes))

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """All that was made since the last block is behind these."""
        for edge in edges_behind(tensors, self._seen):
            self._meet(edge)

    def within_chain(self) -> int:
        """The block that is called now is in one chain with the last one, which its chain's state has come to by what
        was used since: that needs no room of its own but in backward. Returns the bytes."""
        own = [edge for edge, (first, last, _) in self.met.items() if first == last == self._blocks]
        return sum(self.met.pop(edge)[2] for edge in own)

    def end(self) -> None:
        """Let go of the graph: nothing follows."""
        self._noted.clear()
        self._seen.clear()

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which the first block of a chain is given."""
        if tensor.requires_grad and torch.is_grad_enabled():
            self._meet(_edge_of(tensor))
        return tensor

    @property
    def held_nbytes(self) -> int:
        """Most bytes of what is held at once for its later use, and in backward of the gradients from there on; once
        more of the largest: that of a block's uses is not added in place."""
        change = Counter[int]()
        for first, last, nbytes in self.met.values():
            change[first] += nbytes
            change[last + 1] -= nbytes
        most = max(itertools.accumulate(change[at] for at in sorted(change)), default=0)
        return most + max((nbytes for _, _, nbytes in self.met.values()), default=0)

    def _meet(self, edge: Edge) -> None:
        if edge in self._noted:
            first, nbytes = self._noted[edge]
            self.met[edge] = first, self._blocks, nbytes
            self.any = True


def _edge_of(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
