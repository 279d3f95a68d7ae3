"""`Observer`: what the graph that a stage builds looks like, and whether it outlives the stage."""

import weakref
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


class _Saved:
    """One saved tensor, watched."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Token:
    """Lives as long as a node of a graph."""


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Observer:
    """Saved-tensor hooks that notice an unpack before the stage has ended, and a graph that outlives it.
    ``ending_seconds``: from the last saved tensor to the stage's end."""

    def __init__(self) -> None:
        self.inside, self.called, self.ending_seconds = True, False, 0.0
        self._packed_at = perf_counter()
        self.shapes: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        self._packed: list[weakref.ref[_Saved | _Token]] = []

    def pack(self, tensor: torch.Tensor) -> _Saved:
        strides = () if tensor.layout in _COMPRESSED else tensor.stride()
        self.shapes.append((tensor.shape, strides, tensor.dtype))
        saved = _Saved(tensor.detach())  # with its graph, a saved output would keep that graph alive for ever
        self._packed.append(weakref.ref(saved))
        if not torch.compiler.is_compiling():
            self._packed_at = perf_counter()
        return saved

    def ended(self) -> None:
        """The stage has."""
        self.inside, self.ending_seconds = False, perf_counter() - self._packed_at

    def unpack(self, saved: _Saved) -> torch.Tensor:
        self.called = self.called or self.inside
        return saved.tensor

    def watch(self, ends: Iterable[GradientEdge | None]) -> None:
        """Where graphs of the stage end, which lives as long as one of these: not all save something."""
        for edge in ends:
            if edge is None:
                continue
            metadata: Any = edge.node.metadata
            token = metadata[_Token] = _Token()
            self._packed.append(weakref.ref(token))

    def something_lives(self) -> bool:
        """True when a tensor made inside was stored outside with its graph."""
        return any(reference() is not None for reference in self._packed)
