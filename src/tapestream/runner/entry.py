"""`Entry`: where the cotangents of a recorded stage enter its graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Entry:
    """``takes``: by output, whether it has a cotangent.

    Seeds of `torch.autograd.grad` live as long as its call. With ``giving`` the cotangents come from a node of their
    own, behind the outputs, which gives them away: they live until the stage's own last nodes have used them, as those
    that plain PyTorch makes do.
    """

    __slots__ = ("_edges", "_held", "takes")

    def __init__(self, outputs: Sequence[torch.Tensor], *, giving: bool) -> None:
        self.takes = tuple(t.requires_grad for t in outputs)
        self._held: list[torch.Tensor | None] | None = [] if giving else None
        ends = [t for t in outputs if t.requires_grad]
        if giving and ends:
            with torch.enable_grad():
                ends = [_Giving.apply(self._held, *ends)]  # type: ignore[no-untyped-call]
        self._edges = [get_gradient_edge(t) for t in ends]

    def roots(self, cotangents: list[torch.Tensor | None]) -> list[tuple[GradientEdge, torch.Tensor]]:
        """What autograd is to begin with, and its seeds; none where no cotangent enters. ``cotangents``, one for each
        output, is emptied where they are given away."""
        entering = [cotangent for cotangent, takes in zip(cotangents, self.takes, strict=True) if takes]
        if self._held is None:
            pairs = zip(self._edges, entering, strict=True)
            return [(edge, cotangent) for edge, cotangent in pairs if cotangent is not None]
        cotangents.clear()
        if all(cotangent is None for cotangent in entering):
            return []
        self._held[:] = entering
        return [(self._edges[0], torch.empty(0, device="cpu"))]


class _Giving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: list[torch.Tensor | None], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.held = held
        return torch.empty(0, device="cpu")  # no bytes

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        given = tuple(ctx.held)
        ctx.held.clear()
        return (None, *given)
