"""`Tape`: one recorded stage; `Entry`: where its cotangents enter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tapestream.runner.guards import Watch


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


@dataclass(slots=True)
class Tape:
    """One recorded stage, ready for its backward.

    ``inputs``: where each input's cotangent leaves (None where it carries none). ``entry``: where those of the outputs
    enter. ``leaves``: parameters and captured tensors that the graph reaches; ``owners``: the same, but for a stand-in
    the weight it stands for. ``places``: where their gradients leave the graph (asked later, one whose ``.data`` was
    elsewhere meanwhile has a new node). ``watch``: the guard between the parts."""

    inputs: list[GradientEdge | None]
    entry: Entry
    leaves: list[torch.Tensor]
    owners: list[torch.Tensor]
    places: Sequence[GradientEdge | torch.Tensor]
    watch: Watch
