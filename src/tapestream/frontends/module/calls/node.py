"""A block's call as one node of the user's graph."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.frontends.module.calls.call import StreamCall
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.frontends.module.work.observed import given_to
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.modes import with_tangents
from tapestream.runner.state import State


def apply_block(
    call: StreamCall, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A block's call as one node of the user's graph."""
    segment, k = call.order.place_of(position)
    planned = call.prepared.segments[segment]
    bare = planned.stages[k]
    link = Link() if call.interpreters[segment] is None else call.link
    following = call.following
    works, mode = call.works, call.mode
    run = BlockRun(
        bare.name, original, bare.modules, args, kwargs, link, None if following is None else following.current,
        passes=planned.passes[k],
    )  # fmt: skip
    call.enter(position, run, bare.calling(run), segment, k)
    anchor = call.anchor if planned.traits[k].leaves else None
    made: list[State] = []
    again = run.used if following is not None else {}
    given, entries = given_to(run), len(run.tensors)
    with contextlib.nullcontext() if mode is None else mode.left():
        others = planned.traits[k].others
        node = _BlockNode.apply(call, segment, k, made, anchor, tuple(again), others, *run.tensors, *others)  # type: ignore[no-untyped-call]
    outputs, handed_on = node[: len(made[0].requires)], node[len(made[0].requires) :]
    if any(made[0].requires) and not any(t.requires_grad for t in outputs):
        raise GradientError(
            f"{bare.name} returned a tensor that requires a gradient, which it did not when it was profiled: it found "
            "a tensor that another block left in an object; pass that tensor through the state, or detach() it"
        )
    result, call.link = run.finish(made[0], outputs)
    if following is not None:
        pairs = [(t, now) for held, now in zip(again.values(), handed_on, strict=True) for t in held]
        for tensor, now in (*pairs, *call.link.sides_held()):
            following.note(tensor, now)
        given += zip(again, handed_on, strict=True)
    works.begin(segment, k, given, entries, call.link)
    return result


_OTHERWISE = "allow so much that all of it is stored, with home='device', or use the model without stream(...)"


class _BlockNode(torch.autograd.Function):
    """One block call. ``anchor`` makes the node part of the graph when parameters alone need
    gradients. ``again``: which of the tensors come out again, behind what the block returns, for later uses.
    ``others``: the last of the tensors, which the block reaches by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        call: StreamCall,
        segment: int,
        k: int,
        template: list[State],
        anchor: torch.Tensor | None,
        again: tuple[int, ...],
        others: tuple[torch.Tensor, ...],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place, ctx.again, ctx.others = call, (segment, k), again, [id(t) for t in others]
        ctx.count = len(tensors) - len(others)
        with with_tangents():
            out = call.forward(segment, k)
        made = [t.detach() for t in (*out.tensors, *(tensors[entry] for entry in again))]
        own = zip(made[: len(out.requires)], out.requires, strict=True)
        ctx.mark_non_differentiable(*(t for t, requires in own if not requires))
        template.append(State((), out.requires, out.others, out.slots, out.spec))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        check_differentiated_once("this streamed model", _OTHERWISE)
        own = len(cotangents) - len(ctx.again)
        begun: list[torch.Tensor | None] = [None] * ctx.count
        for entry, cotangent in zip(ctx.again, cotangents[own:], strict=True):
            begun[entry] = cotangent
        given, of_others = ctx.call.backward(*ctx.place, list(cotangents[:own]), begun, ctx.others)
        return (None, None, None, None, None, None, None, *given, *of_others)
