"""`StreamCall`: one live call of a streamed model; one autograd node per block call."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.blocks import BlockStore
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.lending import lending_hooks
from tapestream.frontends.live import Live, SegmentView
from tapestream.frontends.observe import split_arguments
from tapestream.frontends.prepare import Prepared
from tapestream.runner.runner import Runner
from tapestream.runner.stage import Stage
from tapestream.runner.state import State, take_apart


class StreamCall:
    """The interpreters of one call, one per segment, and where the call stands.

    ``marker``: part of the graph of every block that has trainable parameters; autograd runs its node when it wants
    their gradients.
    """

    def __init__(self, store: BlockStore, prepared: Prepared, device: torch.device, live: Live) -> None:
        self.store, self.prepared, self.device, self.live = store, prepared, device, live
        self.marker = torch.empty(0, requires_grad=True).view(0)
        node = self.marker.grad_fn
        assert node is not None
        self._node = node
        self.interpreters: list[Interpreter | None] = [None] * len(prepared.segments)
        self.stages: list[list[Stage]] = [[] for _ in prepared.segments]
        self.done = 0  # block calls so far
        self.closed = False
        self._views: list[SegmentView] = []
        self._differentiating = False
        self._last: tuple[tuple[torch.Tensor, int], ...] = ()
        live.calls.add(self)

    @property
    def forward_open(self) -> bool:
        """Whether more block calls are expected."""
        return not self.closed and self.done < len(self.prepared.order)

    def end_forward(self) -> None:
        """The model has returned. What it returned must not be held from here: dropping it ends the call."""
        self._last = ()

    def enter(self, position: int, tensors: tuple[torch.Tensor, ...], stage: Stage, state: State) -> tuple[int, int]:
        """Check that this block call is the one that was planned; returns (segment, stage number)."""
        segment, k = self.prepared.order[self.done]
        planned = self.prepared.segments[segment]
        if planned.positions[k] != position:
            raise InputError(
                f"block {position} was called where block {planned.positions[k]} was called when the model was "
                f"profiled; a model whose blocks run in "
                "a different order at each call is not supported yet"
            )
        linked = len(tensors) == len(self._last) and all(
            a is b and a._version == v for a, (b, v) in zip(tensors, self._last, strict=True)
        )
        if linked != (k > 0):
            raise InputError(
                f"block {position} got {'the' if linked else 'another tensor than the'} output of the block before "
                f"it, other than when the model was profiled "
                "(was that output changed in place?); keep the model's forward the same from call to call"
            )
        if k == 0:
            self._begin(segment, state)
        self.stages[segment][k] = stage
        self.done += 1
        return segment, k

    def _begin(self, segment: int, state: State) -> None:
        planned, plan = self.prepared.segments[segment], self.prepared.plans[segment]
        stages = self.stages[segment] = list(planned.stages)
        uses = [self.store.uses[position] for position in planned.positions]
        view = SegmentView(self.store, uses)
        self._views.append(view)
        store = self.store  # not self: a call that holds itself would outlive its result
        once = self.prepared.once[segment]
        runner = Runner(
            stages, planned.traits, self.device, lambda k: lending_hooks(store, uses[k], stages[k].name), once
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
                "this call was differentiated a second time, but its tape is gone after one backward "
                "(retain_graph=True is not supported); run the "
                "forward again"
            )
        if not self._differentiating:
            self._begin_backward()
        block = self.store.uses[self.prepared.segments[segment].positions[k]]
        if block is not None and self.store.gradients.together:
            self.store.gradients.seed(block, interpreter.sums)
        try:
            return interpreter.run_backward(k, cotangents)
        except BaseException:
            self.abort()
            raise

    def _begin_backward(self) -> None:
        self._differentiating = True
        wanted = torch._C._will_engine_execute_node(self._node)
        for view in self._views:
            view.wanted = wanted
        before, self.live.differentiated = self.live.differentiated, self
        if before is not None:
            before.finish(publish=False)
        elif len(self.live.calls) > 1:
            self.store.gradients.together = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self, *, publish: bool = True) -> None:
        """The backward has ended, or gone on to another call: what it did not ask for is dropped; gradients become
        visible (if ``publish``)."""
        if self.closed:
            return
        try:
            for interpreter in self.interpreters:
                if interpreter is not None:
                    interpreter.finish_backward()
                    self._collect(interpreter)
        finally:
            self._close(publish=publish)

    def _collect(self, interpreter: Interpreter) -> None:
        """Gradients of blocks whose first stage the backward did not reach."""
        for block in self.store.blocks if all(view.wanted for view in self._views) else ():
            self.store.take_gradients(block.index, interpreter.sums)

    def abort(self) -> None:
        """After an exception: nothing of this call is left."""
        if not self.closed:
            self.store.gradients.fresh.clear()
            self._close()

    def _close(self, *, publish: bool = True) -> None:
        self.closed = True
        self.interpreters = [None] * len(self.interpreters)
        self._last = ()
        if self.live.differentiated is self and publish:
            self.live.differentiated = None
        self.live.calls.discard(self)
        self.store.settle(publish=publish)

    def __del__(self) -> None:
        self.live.calls.discard(self)
        # What was returned has been dropped. While others use the store it is settled by them.
        if not self.closed and not self.live.calls and not self.live.busy:
            self._close()


def apply_block(
    call: StreamCall, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A block's call as one node of the user's graph."""
    tree, bind = split_arguments(position, args, kwargs)
    state, tensors = take_apart(tree)
    at, k = call.prepared.order[call.done]
    planned = call.prepared.segments[at]
    trait, stage = planned.traits[k], planned.stages[k].calling(bind(original))
    segment, k = call.enter(position, tensors, stage, state)
    anchor = call.marker if trait.leaves else None
    template: list[State] = []
    outputs = _BlockNode.apply(call, segment, k, template, anchor, *tensors)  # type: ignore[no-untyped-call]
    call.remember(outputs)
    return template[0].tree(outputs)


class _BlockNode(torch.autograd.Function):
    """One block call. ``anchor``, the call's marker, makes the node part of the graph when parameters alone need
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        given = ctx.call.backward(*ctx.place, list(cotangents))
        return (None, None, None, None, None, *given)
