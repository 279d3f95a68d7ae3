"""`StreamCall`: one live call of a streamed model; one autograd node per block call."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.lending import lending_hooks
from tapestream.frontends.observe import split_arguments
from tapestream.frontends.prepare import Prepared
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage
from tapestream.runner.state import State, take_apart


class StreamCall:
    """The interpreters of one call, one per segment, and where the call stands."""

    def __init__(self, store: BlockStore, prepared: Prepared, device: torch.device) -> None:
        self.store, self.prepared, self.device = store, prepared, device
        self.interpreters: list[Interpreter | None] = [None] * len(prepared.segments)
        self.stages: list[list[Stage]] = [[] for _ in prepared.segments]
        self.done = 0  # block calls so far
        self.closed = False
        self.callback_queued = False
        self._views: list[_SegmentView] = []
        self._last: tuple[tuple[torch.Tensor, int], ...] = ()

    @property
    def forward_open(self) -> bool:
        """Whether more block calls are expected."""
        return not self.closed and self.done < len(self.prepared.order)

    @property
    def pending(self) -> bool:
        """Whether a backward is still to come."""
        return not self.closed

    def check_second(self) -> None:
        """Another forward begins while this call waits for its backward."""
        if self.prepared.update == "backward":
            raise GradientError(
                "a second forward began before the backward of the first: with update='backward' the first backward changes the weights that the "
                "second forward has used; call backward() first, or use update='step'"
            )

    def enter(self, position: int, tensors: tuple[torch.Tensor, ...], stage: Stage, state: State) -> tuple[int, int]:
        """Check that this block call is the one that was planned; returns (segment, stage number)."""
        segment, k = self.prepared.order[self.done]
        planned = self.prepared.segments[segment]
        if planned.positions[k] != position:
            raise InputError(
                f"block {position} was called where block {planned.positions[k]} was called when the model was profiled; a model whose blocks run in "
                "a different order at each call is not supported yet"
            )
        linked = len(tensors) == len(self._last) and all(
            a is b and a._version == v for a, (b, v) in zip(tensors, self._last, strict=True)
        )
        if linked != (k > 0):
            raise InputError(
                f"block {position} got {'the' if linked else 'another tensor than the'} output of the block before it, other than when the model was profiled "
                "(was that output changed in place?); keep the model's forward the same from call to call"
            )
        if k == 0:
            self._begin(segment, state)
        self.stages[segment][k] = stage
        self.done += 1
        return segment, k

    def _begin(self, segment: int, state: State) -> None:
        planned, plan = self.prepared.segments[segment], self.prepared.plans[segment]
        stages = self.stages[segment] = [Stage(position, torch.nn.Identity()) for position in planned.positions]
        uses = [self.store.uses[position] for position in planned.positions]
        view = _SegmentView(self.store, uses)
        runner = Runner(
            stages, planned.traits, self.device, lambda k: lending_hooks(self.store, uses[k], stages[k].name)
        )
        interpreter = Interpreter(plan.schedule, runner, blocks=view)
        interpreter.begin(state)
        self.interpreters[segment] = interpreter

    def forward(self, segment: int, k: int) -> State:
        """Run one block."""
        interpreter = self.interpreters[segment]
        assert interpreter is not None
        return interpreter.run_stage(k)

    def remember(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """The tensors that the caller got, to recognise them as the next block's input."""
        self._last = tuple((t, t._version) for t in outputs)

    def backward(self, segment: int, k: int, cotangents: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Differentiate one block."""
        interpreter = self.interpreters[segment]
        if interpreter is None or self.closed:
            raise GradientError(
                "this call was differentiated a second time, but its tape is gone after one backward (retain_graph=True is not supported); run the "
                "forward again"
            )
        self._last = ()
        if not self.callback_queued:
            self.callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        try:
            return interpreter.run_backward(k, cotangents)
        except BaseException:
            self.abort()
            raise

    def finish(self) -> None:
        """The user's backward has ended: what it did not ask for is dropped, gradients become visible."""
        if self.closed:
            return
        self.callback_queued = False
        try:
            for segment, interpreter in enumerate(self.interpreters):
                if interpreter is not None:
                    interpreter.finish_backward()
                    self.store.collect(interpreter.sums)
                self.interpreters[segment] = None
        finally:
            self.closed = True
            self.store.settle()

    def abort(self) -> None:
        """After an exception: nothing of this call is left."""
        if not self.closed:
            self.closed = True
            self.interpreters = [None] * len(self.interpreters)
            self._last = ()
            self.store.fresh.clear()
            self.store.settle()

    def __del__(self) -> None:
        if not self.closed and any(self.interpreters):
            self.closed = True
            self.store.settle()


def apply_block(
    call: StreamCall, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A block's call as one node of the user's graph."""
    tree, bind = split_arguments(position, args, kwargs)
    state, tensors = take_apart(tree)
    planned = call.prepared.order[call.done]
    trait = call.prepared.traits[planned[0]][planned[1]]
    block_module = call.store.modules[position]
    stage = Stage(position, block_module).calling(bind(original))
    segment, k = call.enter(position, tensors, stage, state)
    anchor = torch.empty(0, requires_grad=bool(trait.leaves))
    template: list[State] = []
    outputs = _BlockNode.apply(call, segment, k, template, anchor, *tensors)  # type: ignore[no-untyped-call]
    call.remember(outputs)
    return template[0].tree(outputs)


class _BlockNode(torch.autograd.Function):
    """One block call. ``anchor`` makes the node part of the graph when parameters alone need gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: StreamCall,
        segment: int,
        k: int,
        template: list[State],
        anchor: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place = call, (segment, k)
        out = call.forward(segment, k)
        ctx.mark_non_differentiable(*(t for t, requires in zip(out.tensors, out.requires, strict=True) if not requires))
        template.append(State((), out.requires, out.others, out.slots, out.spec))
        return tuple(t.detach() for t in out.tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        given = ctx.call.backward(*ctx.place, list(cotangents))
        return (None, None, None, None, None, *given)


class _SegmentView:
    """The store as one segment's interpreter sees it: stages numbered within the segment."""

    def __init__(self, store: BlockStore, uses: list[int | None]) -> None:
        self._store, self._uses = store, uses
        self._last_use = {b: k for k, b in reversed(list(enumerate(uses))) if b is not None}
        self.start, self.wait, self.free = store.start, store.wait, store.free
        self.update, self.has_gradient = store.update, store.has_gradient

    def compute_begins(self, stage: int) -> None:
        self._store.compute_begins(self._uses[stage])

    def compute_ended(self, stage: int) -> None:
        self._store.compute_ended(self._uses[stage])

    def backward_ended(self, stage: int, sums: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        block = self._uses[stage]
        if block is not None and self._last_use[block] == stage:
            self._store.take_gradients(block, sums)
