"""`StreamCall`: one live call of a streamed model; one autograd node per block call."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tapestream.errors import GradientError
from tapestream.executor.blocks import BlockStore, Replaced
from tapestream.executor.gradients import Sums
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.lending import lending_hooks
from tapestream.executor.travel.parcel import Parcels
from tapestream.frontends.below import Below
from tapestream.frontends.giving_way import Reason
from tapestream.frontends.module.calls.absent import AbsentChains
from tapestream.frontends.module.calls.anchor import anchored, watching
from tapestream.frontends.module.calls.following import WRITTEN, Following
from tapestream.frontends.module.calls.live import (
    CUT_SHORT,
    DIFFERENTIATED_TWICE,
    Live,
    SegmentView,
    check_no_gradients,
)
from tapestream.frontends.module.calls.order import BlockOrder
from tapestream.frontends.module.calls.outside_sums import OutsideSums
from tapestream.frontends.module.homes.between import BetweenBlocks
from tapestream.frontends.module.homes.wide import adds_once
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.frontends.module.observing.returned import Watched
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.work.called import WorkOfCall
from tapestream.ir.actions import Tier
from tapestream.runner.ambient import mark_of_autocast
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Watch
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, take_apart, tensors_in


class StreamCall:
    """The interpreters of one call, one per segment, and where the call stands.

    ``asked``: the plans of such a call alone, which ``prepared`` goes back to. ``anchor``: part of the graph of every
    block that has trainable parameters. ``plain``: the plan leaves every parameter on the device and runs every block
    once, so that the blocks are nodes of the user's own graph and only their order and the bytes that they hold are our
    concern. ``casts``: what calls have in common that share the casts of their weights, None where none are cast.
    """

    closed: bool | None = None
    cut_short = False
    given_up: Reason | None

    def __init__(
        self,
        store: BlockStore,
        asked: Prepared,
        prepared: Prepared,
        device: torch.device,
        live: Live,
        below: Below,
        outside: OutsideSums,
    ) -> None:
        self._below, self._parcels, self._outside = below, list[Parcels](), outside
        below.settle()
        self.store, self.asked, self.prepared, self.device, self.live = store, asked, prepared, device, live
        self.interpreters: list[Interpreter | None] = [None] * len(prepared.segments)
        self.stages: list[list[Stage]] = [[] for _ in prepared.segments]
        self._traits: list[list[Traits]] = [[] for _ in prepared.segments]
        self.order = BlockOrder(prepared)
        stored = all(len(o) == len(s.positions) for o, s in zip(prepared.once, prepared.segments, strict=True))
        # Gradients of several calls are added by autograd for all of them, or by the store.
        alone = live.alone and outside.sharing is None
        self.plain = stored and store.home is Tier.DEVICE and prepared.update != "backward" and alone
        casting = not self.plain and any(traits.casts for segment in prepared.segments for traits in segment.traits)
        self.casts = mark_of_autocast(device) if casting else None
        self.anchor = torch.empty(0, device="cpu") if self.plain else self._anchored()
        self.closed, self.given_up, self._views = False, None, dict[int, SegmentView]()
        self._ended, self._differentiating = set[int](), False  # shared blocks whose owner's backward has run
        self.absent = AbsentChains(prepared.order, divided=store.copies.shards is not None)
        self._returned, self.link = Watched(), Link()
        reused = not self.plain and any(segment.reused for segment in prepared.segments)
        self.works = WorkOfCall(() if self.plain else prepared.segments, prepared.once, device, self)
        self.following = Following(self.works.trace) if reused else None
        self.mode: BetweenBlocks | None = self.following or self.works.trace  # entered between blocks
        self._given: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._replaced: frozenset[Replaced] = frozenset()  # by its own forward
        live.wait(self)

    def _anchored(self) -> torch.Tensor:
        root = root_of_graph().view(0)
        blocks = [block for block in self.store.blocks if block.index not in self.prepared.pinned]
        anchor, self._ends = anchored(root, [p for block in blocks for p in block.parameters])
        self._watched = watching(self.prepared.watched, self._ends[0])
        return anchor

    def watched(self, result: Any) -> Any:
        """``result`` of the model. Whether the user still holds it is looked at when backward begins."""
        self.live.allocator.ended()
        self._returned = self.asked.returned.watch(result)
        if self.following is not None:
            self.following.check()
        return result

    def followed(self) -> contextlib.AbstractContextManager[None]:
        """The model's forward runs inside."""
        return contextlib.nullcontext() if self.mode is None else self.mode.until(begins=self.works.trace is not None)

    def end_forward(self) -> None:
        """The model has returned. What it returned must not be held from here: dropping it ends the call."""
        if self.following is not None:
            self._given = self.following.end()
        self.link, self.following, self.mode = Link(), None, None
        self.works.end()
        self._replaced = self.store.replaced()

    def enter(self, position: int, run: BlockRun, stage: Stage, segment: int, k: int) -> None:
        """A block call at the place that `BlockOrder` gave. Raises UnplannedBlock where the plan links it otherwise."""
        planned = self.prepared.segments[segment]
        interpreter, state = self.interpreters[segment], take_apart(run.tensors)[0]
        begun = interpreter is not None
        onward = self.works.links(segment, k, run.tensors, state) if begun and not run.linked else None
        if (run.linked or onward is not None) != begun:
            raise self.order.unplanned(
                position,
                f"got {'the' if run.linked else 'another tensor than the'} output of the block before it, unlike in "
                "the profiled call (was that output changed in place?)",
            )
        if k not in self.prepared.once[segment]:
            run.keep_arguments(clone=planned.clones[k])
        if interpreter is None:
            self.absent.pass_by(segment, self.interpreters, self._begin)
            self._begin(segment).begin(state)
        elif onward is not None:
            interpreter.go_on(onward)
        self.stages[segment][k], self._traits[segment][k] = stage, planned.traits[k]

    def run_plain(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One block call of a ``plain`` call, as in plain PyTorch. The last one's graph keeps this call alive."""
        self.order.place_of(position)
        out = original(*args, **kwargs)
        for tensor in tensors_in(out):  # of every block: which is the last one is known afterwards only
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._end_plain)
        return out

    def _end_plain(self, cotangents: Any) -> None:
        """A backward has begun; when it ends, the tape is gone unless it was to be retained."""
        self._returned.look()
        self.live.begins(self, cotangents)
        if not self._differentiating and not torch._C._autograd._get_current_graph_task_keep_graph():
            self._differentiating = True
            torch.autograd.Variable._execution_engine.queue_callback(self._close)

    def _begin(self, segment: int) -> Interpreter:
        planned, plan = self.prepared.segments[segment], self.prepared.plans[segment]
        stages = self.stages[segment] = list(planned.stages)
        uses = [self.store.uses[position] for position in planned.positions]
        borrowed = {b for b, shared in self.prepared.shared.items() if shared.owner != segment}
        unread = {k for k, cost in enumerate(planned.costs) if not cost.reads_parameters}
        view = self._views[segment] = SegmentView(self.store, uses, borrowed, unread)
        store, once, watch = self.store, self.prepared.once[segment], Watch()  # a call that holds itself lives on
        runner = Runner(stages, planned.traits, self.device, once=once, resident=False, watch=watch)
        runner.traits = self._traits[segment] = [Traits(draws_host=False, casts_twice=False)] * len(stages)
        stages[:] = [stage.calling(_handed_on) for stage in stages]  # until a block is called, it counts as left out
        parcels, moving = None, self.prepared.moving[segment]
        if moving is not None:
            self._parcels.append(parcels := self._below.parcels(()))
        interpreter = Interpreter(plan.schedule, runner, blocks=view, parcels=parcels, moving=moving or (),
                                  between=self.works.of(segment))  # fmt: skip
        travel = interpreter.travel
        runner.hooks = lambda k: lending_hooks(store, uses[k], stages[k].name, watch, travel.hooks(stages[k], k))
        self.interpreters[segment] = interpreter
        return interpreter

    def forward(self, segment: int, k: int) -> State:
        """Run one block."""
        interpreter = self.interpreters[segment]
        assert interpreter is not None
        return interpreter.run_stage(k)

    def backward(
        self, segment: int, k: int, cotangents: Gradients, begun: Gradients, others: Sequence[int]
    ) -> tuple[Gradients, Gradients]:
        """Differentiate one block: gradients of its inputs, and of ``others`` (ids), which belong to no block.
        ``begun``: gradients of its inputs that later uses of them have made."""
        interpreter = self._differentiated(segment)
        self.absent.back_to(segment, self.interpreters)
        self.works.forget(segment, k)
        self._seed(segment, k, interpreter.sums)
        interpreter.segments.begun = lambda stage: begun if stage == k else []
        try:
            with checkpointing_off():
                given = interpreter.run_backward(k, cotangents)
            found = [interpreter.sums.pop(key, None) for key in others]
            return given, [None if pair is None else pair[1] for pair in found]
        except BaseException:
            self.abort()
            raise
        finally:
            interpreter.segments.begun = None

    def record_for_backward(self, segment: int, k: int) -> None:
        """Record a block, and make again what the model's work behind it has saved."""
        interpreter = self._differentiated(segment)
        try:
            with checkpointing_off():
                interpreter.record_for_backward(k)
        except BaseException:
            self.abort()
            raise

    def _differentiated(self, segment: int) -> Interpreter:
        """Of a chain that the backward has reached. Raises GradientError where the call has ended."""
        interpreter = self.interpreters[segment]
        if interpreter is None or self.closed:
            self._outside.fail()
            if self.given_up is not None:
                raise self.given_up()
            raise GradientError(CUT_SHORT if self.cut_short else DIFFERENTIATED_TWICE)
        if not self._differentiating:
            self._begin_backward()
        return interpreter

    def _seed(self, segment: int, k: int, sums: Sums) -> None:
        """Let the backward of a block go on from what others of this backward have added up."""
        position = self.prepared.segments[segment].positions[k]
        block = self.store.uses[position]
        if block is None:
            return
        shared = self.prepared.shared.get(block)
        if shared is not None and block in self._ended and segment != shared.owner:
            raise GradientError(
                f"backward reached {self.prepared.segments[segment].stages[k].name} after the first use of its shared "
                "parameters, not in the reverse order of the forward; use the model without stream(...)"
            )
        if self.store.gradients.together:
            self.store.gradients.seed(block, sums)
        elif shared is not None:
            view = self._views[segment]
            once = adds_once(self.store.modules[position])
            self.store.gradients.seed(block, view.seeds if once else sums)
            if (segment, k) == shared.places[0]:
                self._ended.add(block)

    def _begin_backward(self) -> None:
        if self.following is not None:
            raise GradientError(
                "a gradient was asked for inside of the model's forward, of something that uses the input of an "
                "earlier block; ask before that block is called, or detach() and use a copy of your own"
            )
        self._differentiating = True
        self._returned.look()
        self.live.begins(self)
        if any((t := held()) is not None and t._version != version for held, version in self._given):
            raise GradientError(f"a tensor given to a block, and used by other code after the block, was {WRITTEN}")
        if self.prepared.update == "backward":
            check_no_gradients(self.store, self.prepared.pinned)
        self.store.adopt_replaced(but=self._replaced)
        self.absent.pass_by(None, self.interpreters, self._begin)  # a head may have come after the model
        self._outside.begins(len(self.live.calls))
        root, anchor = self._ends
        wanted = torch._C._will_engine_execute_node(root)
        if not wanted and torch._C._will_engine_execute_node(anchor):
            raise GradientError(
                "gradients of chosen parameters of streamed blocks were asked for, by autograd.grad() or "
                "backward(inputs=...), but they arrive only in their home: call backward() and read .grad, or freeze "
                "the others with requires_grad_(False)"
            )
        for view in self._views.values():
            view.wanted = wanted
        before, self.live.differentiated = self.live.differentiated, self
        if before is not None:
            before.finish(publish=False)
        elif len(self.live.calls) > 1:
            self.store.gradients.together = True
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self, *, publish: bool = True) -> None:
        """The backward has ended, or another has begun: what it did not ask for goes; gradients show (``publish``)."""
        if self.closed:
            return
        try:
            for interpreter in self.absent.in_the_end(self.interpreters):
                self._collect(interpreter)
                interpreter.finish_backward()
            self._outside.sum(wanted=all(view.wanted for view in self._views.values()))
        finally:
            self._close(publish=publish)

    def _collect(self, interpreter: Interpreter) -> None:
        """Gradients of blocks whose first stage the backward did not reach: the rest of the plan is about them too."""
        for block in self.store.blocks if all(view.wanted for view in self._views.values()) else ():
            self.store.take_gradients(block.index, interpreter.sums)

    def abort(self) -> None:
        """After an exception: nothing of this call is left."""
        if not self.closed:
            self.store.gradients.clear()
            self._outside.fail()
            self._close()

    def is_used(self) -> bool:
        """Whether the backward that is under way comes here."""
        return any(torch._C._will_engine_execute_node(node) for node in self._ends)

    def give_way(self, reason: Reason) -> None:
        """See `giving_way.GivesWay`."""
        self.given_up = reason
        self.live.gave_way.add(self)
        self._close()

    def _close(self, *, publish: bool = True) -> None:
        if self.closed:
            return
        self.closed = True
        self.live.allocator.ended()
        self.interpreters = [None] * len(self.interpreters)
        self.link = Link()
        if self.live.differentiated is self and publish:
            self.live.differentiated = None
        self.live.end(self)
        try:
            while self._parcels:
                self._parcels.pop().close()
        finally:
            self.store.settle(publish=publish)

    def __del__(self) -> None:
        if self.closed is None:  # never made: Ctrl-C came
            return
        self.live.end(self)
        while self._parcels:
            self._below.leave(self._parcels.pop())
        # What was returned has been dropped. While others use the store it is settled by them.
        if not self.closed and not self.live.calls and not self.live.busy:
            self._close()


def _handed_on(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A block that is left out of a call."""
    return state
