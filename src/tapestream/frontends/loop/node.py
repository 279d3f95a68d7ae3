"""The one autograd node of a loop."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from tapestream.errors import GradientError
from tapestream.frontends.giving_way import Reason
from tapestream.frontends.together import Key, Together, begun, opened
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.modes import unhooked, with_tangents
from tapestream.runner.nesting import covering

Gradients = Sequence[torch.Tensor | None]


class Call(Protocol):
    """One live call of a loop."""

    def run(self) -> tuple[list[torch.Tensor], list[bool]]:
        """The forward phase: tensors of the result, and which of them carry gradients."""

    def differentiate(self, cotangents: Gradients) -> Gradients:
        """The backward phase: a gradient for each tensor that the node was given."""

    def release(self) -> None:
        """Drop what is held."""

    together: Together | None
    given_up: Reason | None

    def adds_to(self) -> Collection[Key]:
        """See `together.Open`."""


class LoopNode(torch.autograd.Function):
    """Holds a call until its backward, or until nobody can ask for it."""

    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor) -> Any:
        """Run the loop."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        with covering(), unhooked(), with_tangents(), reentrant_checkpointing_off():
            out, requires = call.run()
        ctx.mark_non_differentiable(*(t for t, r in zip(out, requires, strict=True) if not r))
        opened(ctx)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """Reverse the loop."""
        check_differentiated_once("this loop", "write the loop in plain Python")
        call, ctx.call = ctx.call, None
        if call is None:
            raise GradientError(
                "this loop was differentiated a second time, but its restart checkpoints are gone after one backward "
                "(retain_graph=True is not supported); run the loop again"
            )
        call.together = begun(ctx, call)
        try:
            with covering(), reentrant_checkpointing_off():
                return (None, *call.differentiate(cotangents))
        finally:
            call.release()


def differentiable(call: Call, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The result's tensors, attached to a node over ``inputs``."""
    out: Any = LoopNode.apply(call, *inputs)  # type: ignore[no-untyped-call]
    return tuple(out)
