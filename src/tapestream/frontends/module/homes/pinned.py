"""`Pinned`: parameter blocks that code uses otherwise than by calls of their modules, so that they never leave."""

from collections.abc import Collection

import torch
from torch import nn

from tapestream.executor.blocks import BlockStore
from tapestream.ir.actions import Value


class Pinned:
    """Blocks that are plain tensors on the device: calls of their modules are the user's own, autograd gives them
    their gradients, and an optimizer's step updates them as it updates what lies outside the blocks."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.blocks: frozenset[int] = frozenset()

    def add(self, blocks: Collection[int]) -> None:
        """These too, from now on."""
        self.blocks = self._store.updates.pinned = self.blocks | frozenset(blocks)

    def bring(self) -> None:
        """See that they are on the device, for a call that no plan is for."""
        if not self.values() <= self._store.copies.resident:
            with torch.inference_mode(False):
                self._store.place(self._store.copies.resident | self.values())

    def values(self) -> frozenset[Value]:
        """What of them lives on the device throughout."""
        return frozenset(value for block in self.blocks for value in self._store.copies.shown_values(block))

    def parameters(self) -> list[nn.Parameter]:
        """Those of all of them."""
        return [p for block in sorted(self.blocks) for p in self._store.blocks[block].parameters]
