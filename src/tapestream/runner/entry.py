"""`Entry`: where the cotangents of a recorded stage enter its graph, which holds them no longer than it must."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Entry:
    """A node behind ``outputs``, one of which requires a gradient at least, that has their cotangents to give away.

    Seeds of `torch.autograd.grad` live as long as its call. These live until the stage's own last node has used them,
    as the cotangents that plain PyTorch makes do. ``takes``: by output, whether it has a cotangent.
    """

    __slots__ = ("_edge", "_held", "takes")

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.takes = tuple(t.requires_grad for t in outputs)
        self._held: list[torch.Tensor | None] = []
        self._edge: GradientEdge | None = None
        if any(self.takes):
            with torch.enable_grad():
                given = (t for t in outputs if t.requires_grad)
                self._edge = get_gradient_edge(_Giving.apply(self._held, *given))  # type: ignore[no-untyped-call]

    def root(self, cotangents: list[torch.Tensor | None]) -> tuple[GradientEdge, torch.Tensor] | None:
        """What autograd is to begin with, and its seed; ``cotangents``, one for each output, is emptied. None where no
        cotangent enters."""
        held = [cotangent for cotangent, takes in zip(cotangents, self.takes, strict=True) if takes]
        cotangents.clear()
        if self._edge is None or all(cotangent is None for cotangent in held):
            return None
        self._held[:] = held
        return self._edge, torch.ones(())


class _Giving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: list[torch.Tensor | None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        given = tuple(ctx.held)
        ctx.held.clear()
        return (None, *given)
