"""A block's call as one node of the user's graph."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.frontends.module.calls.call import StreamCall
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.state import State


def apply_block(
    call: StreamCall, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A block's call as one node of the user's graph."""
    segment, k = call.place_of(position)
    planned = call.prepared.segments[segment]
    bare = planned.stages[k]
    link = Link() if call.interpreters[segment] is None else call.link
    run = BlockRun(bare.name, original, bare.modules, args, kwargs, link)
    call.enter(position, run, bare.calling(run), segment, k)
    anchor = call.anchor if planned.traits[k].leaves else None
    made: list[State] = []
    outputs = _BlockNode.apply(call, segment, k, made, anchor, *run.tensors)  # type: ignore[no-untyped-call]
    if any(made[0].requires) and not any(t.requires_grad for t in outputs):
        raise GradientError(
            f"{bare.name} returned a tensor that requires a gradient, which it did not when it was profiled: it found "
            "a tensor that another left in an object; pass that through the state, or detach() it"
        )
    result, call.link = run.finish(made[0], outputs)
    return result


class _BlockNode(torch.autograd.Function):
    """One block call. ``anchor`` makes the node part of the graph when parameters alone need
    gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: StreamCall,
        segment: int,
        k: int,
        template: list[State],
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place = call, (segment, k)
        out = call.forward(segment, k)
        ctx.mark_non_differentiable(*(t for t, requires in zip(out.tensors, out.requires, strict=True) if not requires))
        template.append(State((), out.requires, out.others, out.slots, out.spec))
        return tuple(t.detach() for t in out.tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        check_differentiated_once("this streamed model", "use the model without stream(...)")
        given = ctx.call.backward(*ctx.place, list(cotangents))
        return (None, None, None, None, None, *given)
