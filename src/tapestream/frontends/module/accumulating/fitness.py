"""Whether micro-batches may pass the blocks of a model together, as far as that is known before anything runs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as every

from tapestream.executor.stepped import SteppedGradient
from tapestream.frontends.module.calls.anchor import hooked
from tapestream.frontends.module.observing.observed import Segment
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.passes.residency import uses_of_blocks
from tapestream.runner.hooks import hooks_of
from tapestream.runner.modes import only_places_tensors
from tapestream.runner.private import tensors_in
from tapestream.runner.stage import Traits, is_compiled

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


def why_not_model(handle: "Streamed", micro_batches: Sequence[Any]) -> str | None:
    """What stands in the way, of the model and what is around it; None where nothing does."""
    return next(_of_model(handle, micro_batches), None)


def why_not_calls(handle: "Streamed", found: Sequence[Prepared]) -> str | None:
    """The same, of what the profile has seen of each micro-batch."""
    return next(_of_calls(handle, found), None)


def _of_model(handle: "Streamed", micro_batches: Sequence[Any]) -> Iterator[str]:
    model = handle.model
    if handle.ranks.exchange is not None or handle.ranks.one_plan is not None:
        yield "ranks sum the gradients of one backward after the other (peers=)"
    if handle.given is not None:
        yield "plan= fixes the plan of a call"
    if handle.homes.tables.modules:
        yield "rows of tables= are looked up call by call"
    if handle._live.calls or handle._live.gave_way:
        yield "the result of an earlier call is still held whose backward has not run"
    if any(p.grad is not None and not isinstance(p.grad, SteppedGradient) for p in model.parameters()):
        yield "gradients of an earlier backward are there; call zero_grad() before"
    if any(map(hooked, model.parameters())):
        yield "a parameter has hooks, which see the gradient of each micro-batch"
    if any(hooks for module in model.modules() for hooks in hooks_of(module)) or _global_hooks():
        yield "a module has hooks, which see one micro-batch after the other"
    if any(map(is_compiled, model.modules())):
        yield "it has compiled modules, which belong to one thread"
    if not only_places_tensors():
        yield "modes of PyTorch are entered around the call, which belong to one thread"
    if any(t.requires_grad for t in tensors_in([micro_batches])):
        yield "a micro-batch asks for a gradient itself"


def _global_hooks() -> bool:
    return any(
        (
            every._global_forward_hooks,
            every._global_forward_pre_hooks,
            every._global_backward_hooks,
            every._global_backward_pre_hooks,
        )
    )


def _of_calls(handle: "Streamed", found: Sequence[Prepared]) -> Iterator[str]:
    if len({(one.order, tuple(tuple(s.positions) for s in one.segments)) for one in found}) > 1:
        yield "micro-batches go through other blocks than each other"
    for one in found:
        if one.writes_outside:
            yield "code outside of the blocks writes buffers, which the next micro-batch reads"
        if one.shared or any(max(uses_of_blocks(p).values(), default=0) > 1 for p in one.profiles):
            yield "blocks share parameters, whose gradients would be added in another order"
        for segment in one.segments:
            yield from _of_segment(handle.blocks, segment)


def _of_segment(blocks: Sequence[nn.Module], segment: Segment) -> Iterator[str]:
    if segment.reused:
        yield "code outside of the blocks uses what a block was given"
    if any(cut is not None for cut in segment.cuts):
        yield "the budget is too small for chains that end where code outside of the blocks comes between two of them"
    if any(segment.passes):
        yield "blocks pass tensors with gradients on in objects"
    for position, traits in zip(segment.positions, segment.traits, strict=True):
        if (why := _of_block(traits)) is not None:
            yield f"block {position} ({type(blocks[position]).__name__}) {why}"


def _of_block(traits: Traits) -> str | None:
    if traits.buffers or traits.cells:
        return "writes what the next micro-batch reads (buffers, as BatchNorm does)"
    if traits.left:
        return "leaves tensors in attributes"
    if traits.others:
        return "uses a tensor of the model that belongs to no block"
    if traits.generators:
        return "draws random numbers from generators of its own"
    return None
