"""`JointCall`: all micro-batches of one step, block by block, forward and backward."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.errors import GradientError
from tapestream.executor.interpreter import Interpreter
from tapestream.executor.joint import JointRunner
from tapestream.executor.lending import lending_hooks
from tapestream.executor.stepped import SteppedGradient
from tapestream.executor.travel.parcel import Parcels
from tapestream.frontends.module.accumulating.losses import checked
from tapestream.frontends.module.accumulating.micro import Micro
from tapestream.frontends.module.accumulating.pieces import ApartUnknown, Cut, DrawsUnknown, Pieces, Unfit
from tapestream.frontends.module.accumulating.start import Start
from tapestream.frontends.module.accumulating.threads import BlockRequest, Ended, ForwardThread
from tapestream.frontends.module.calls.live import SegmentView, check_no_gradients
from tapestream.frontends.module.calls.ready import make_ready
from tapestream.frontends.module.calls.stepping import entering
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.checkpointing import checkpointing_off
from tapestream.runner.draws import Draws
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Watch
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.state import State, take_apart

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

Forward = Callable[[], Any]
"""Calls the model with one micro-batch, and the loss with what that gives."""


class JointCall:
    """``prepared``: the plans of all together; ``found``: those of each micro-batch by itself; ``draws``: of each
    (None: not known); ``apart_nbytes``: what ``prepared`` counts for gradients that are made for each of them apart.

    Nothing is changed until the backward of the last block begins: up to there `run` may raise Unfit, and all is as
    before. (Python code of the user's may have run in vain.)
    """

    def __init__(
        self,
        handle: "Streamed",
        prepared: Prepared,
        found: Sequence[Prepared],
        forwards: Sequence[Forward],
        draws: Sequence[Draws | None],
        apart_nbytes: int,
        start: Start,
    ) -> None:
        self._handle, self._prepared, self._draws, self._apart_nbytes = handle, prepared, draws, apart_nbytes
        self._store, self._root, self._start = handle.store, root_of_graph(), start
        states, self._micros = start.generators, list[Micro]()
        for number, (planned, forward, drawn) in enumerate(zip(found, forwards, draws, strict=True)):
            self._micros.append(Micro(number, planned, ForwardThread(forward, handle.device), states, states))
            states = states if drawn is None else drawn.behind(states)
        self._end = states
        pinned = handle.pinned.blocks
        blocks = (block for block in self._store.blocks if block.index not in pinned)
        self._pieces = Pieces(frozenset(id(p) for block in blocks for p in block.parameters))
        self._interpreters: list[Interpreter] = []
        self._joint: list[JointRunner] = []
        self._parcels: list[Parcels] = []
        self._now: Micro | None = None

    def run(self) -> list[torch.Tensor]:
        """The losses, detached, with gradients made. Raises Unfit where all is as if nothing had been done."""
        handle = self._handle
        with handle._live.working(), entering(handle, handle.model), checkpointing_off():
            make_ready(handle, self._prepared)
            handle._allocator.begins()
            try:
                losses = self._run_forward()
                if self._prepared.update == "backward":
                    check_no_gradients(self._store, self._prepared.pinned)
                self._run_backward()
            except BaseException:
                self._store.gradients.clear()
                self._close()
                for parameter in handle.model.parameters():
                    if not isinstance(parameter.grad, SteppedGradient):
                        parameter.grad = None  # as they were
                raise
            self._close()
        return losses

    def wait_at_block(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A block is called in one of the threads."""
        assert self._now is not None
        if not torch.is_grad_enabled():
            raise Unfit(f"block {position} is called without gradients")
        return self._now.thread.wait_at(BlockRequest(position, original, args, kwargs))

    # -- forward -------------------------------------------------------------------------------------------------

    def _run_forward(self) -> list[torch.Tensor]:
        self._handle.call, self._handle.joint = None, self
        try:
            for call, (segment, k) in enumerate(self._prepared.order):
                self._run_block(call, segment, k)
            return [self._run_turn(micro) for micro in self._micros]
        finally:
            for micro in self._micros:
                micro.thread.stop()
            self._handle.joint = None

    def _run_block(self, call: int, segment: int, k: int) -> None:
        for micro in self._micros:
            answer = self._advanced(micro)
            position = self._prepared.segments[segment].positions[k]
            if not isinstance(answer, BlockRequest) or answer.position != position:
                raise Unfit("one of them calls the blocks in another order than the profiled call")
            if k == 0:
                micro.stages, micro.link = list(micro.planned.segments[segment].stages), Link()
        runs = [self._entered(micro, call, segment, k) for micro in self._micros]
        if k == 0:
            self._begin(segment, [take_apart(run.tensors)[0] for run in runs])
        state = self._interpreters[segment].run_stage(k)
        self._start.check()
        joint = self._joint[segment]
        tensors, requires = joint.parted(k + 1, state.tensors), joint.parted(k + 1, state.requires)
        del state
        for micro, run, made, needed in zip(self._micros, runs, tensors, requires, strict=True):
            outputs = Cut.apply(partial(micro.catch, call), self._root, needed, *made)  # type: ignore[no-untyped-call]
            made.clear()
            self._pieces.cut(micro.number, call, outputs)
            micro.edges[call] = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
            micro.result, micro.link = run.finish(joint.structures(k + 1)[micro.number], outputs)

    def _advanced(self, micro: Micro) -> BlockRequest | Ended:
        self._now = micro
        with self._drawing(micro):
            return micro.advance()

    @contextlib.contextmanager
    def _drawing(self, micro: Micro) -> Iterator[None]:
        """Inside, generators are where the micro-batch has left them."""
        if not micro.generators.still():
            micro.generators.restore()
        yield
        if micro.generators.still():
            return
        if self._draws[micro.number] is None:
            raise DrawsUnknown("it is not known how many random numbers each of them draws")
        micro.generators = TorchGenerators.capture(self._handle.device)

    def _entered(self, micro: Micro, call: int, segment: int, k: int) -> BlockRun:
        """A block call of one micro-batch, as a function of its state."""
        request, micro.answer = micro.answer, None
        assert isinstance(request, BlockRequest)
        planned = micro.planned.segments[segment]
        bare = planned.stages[k]
        run = BlockRun(bare.name, request.original, bare.modules, request.args, request.kwargs, micro.link)
        if run.linked != (k > 0):
            raise Unfit(f"block {request.position} is given other tensors than in the profiled call")
        if run.things:
            raise Unfit(f"block {request.position} is given objects that it may change (a cache)")
        if k:
            self._pieces.linked(micro.number, call - 1, run.entries)
        else:
            micro.roots[call] = run.tensors
            self._pieces.add(micro.number, call, run.tensors)
        run.keep_arguments(clone=planned.clones[k])
        micro.stages[k] = bare.calling(run)
        return run

    def _begin(self, segment: int, states: Sequence[State]) -> None:
        handle, planned = self._handle, self._prepared.segments[segment]
        uses = [self._store.uses[position] for position in planned.positions]
        view = SegmentView(self._store, uses)
        runners = [self._runner(micro, segment, uses) for micro in self._micros]
        micros, drawing = self._micros, self._drawing

        def within(number: int, function: Callable[[], State]) -> State:
            with drawing(micros[number]):
                return micros[number].thread.within(function)

        self._joint.append(joint := JointRunner(planned.stages, runners, within))
        parcels, moving = None, self._prepared.moving[segment]
        if moving is not None:
            self._parcels.append(parcels := handle.homes.states.parcels(()))
        schedule = self._prepared.plans[segment].schedule
        interpreter = Interpreter(schedule, joint, blocks=view, parcels=parcels)
        interpreter.begin(joint.joined(0, states))
        self._interpreters.append(interpreter)

    def _runner(self, micro: Micro, segment: int, uses: Sequence[int | None]) -> Runner:
        """Of one micro-batch, as autocast is where its forward runs."""
        store, stages, watch = self._store, micro.stages, Watch()
        traits, device = micro.planned.segments[segment].traits, self._handle.device
        runner = micro.thread.within(lambda: Runner(stages, traits, device, resident=False, watch=watch))
        runner.hooks = lambda k: lending_hooks(store, uses[k], stages[k].name, watch)
        return runner

    def _run_turn(self, micro: Micro) -> torch.Tensor:
        """What is behind the last block, forward and backward: the head and the loss of one micro-batch at a time."""
        answer = self._advanced(micro)
        self._start.check()
        if not isinstance(answer, Ended):
            raise Unfit("one of them calls a block where the profiled call did not")
        following = self._micros[micro.number + 1 :]
        if not (following[0].begins if following else self._end).equals(micro.generators):
            raise Unfit("how many random numbers one of them draws is another from step to step")
        loss, micro.answer = checked(answer.value), None
        del answer
        piece = len(self._prepared.order)
        self._pieces.add(micro.number, piece, [loss])
        apart = (len(self._micros) - 1) * sum(map(tensor_nbytes, self._pieces.apart.values()))
        if apart > self._apart_nbytes:
            raise ApartUnknown(apart)
        self._differentiate(micro, piece, [loss], [torch.ones_like(loss)])
        if not micro.generators.still():
            raise Unfit("the backward of one draws random numbers")
        return loss.detach()

    # -- backward ------------------------------------------------------------------------------------------------

    def _run_backward(self) -> None:
        order = self._prepared.order
        given: list[Gradients] | None = None  # by micro-batch, to what the block before has returned
        for call in reversed(range(len(order))):
            segment, k = order[call]
            interpreter, cotangents = self._interpreters[segment], list[torch.Tensor | None]()
            for number, micro in enumerate(self._micros):
                mine = None if given is None else given[number]
                cotangents += micro.gradients(call, mine, self._root)
            given = self._joint[segment].parted(k, interpreter.run_backward(k, cotangents))
            if k == 0:
                for micro, gradients in zip(self._micros, given, strict=True):
                    self._differentiate(micro, call, micro.roots.pop(call), gradients)
                given = None
        for interpreter in self._interpreters:
            for block in self._store.blocks:
                self._store.take_gradients(block.index, interpreter.sums)
            interpreter.finish_backward()
        if not self._micros[-1].generators.still():
            raise GradientError(
                "accumulate: the backward of a block draws random numbers, which plain PyTorch would draw between the "
                "micro-batches; call backward() for each micro-batch"
            )

    def _differentiate(self, micro: Micro, piece: int, roots: Sequence[torch.Tensor], gradients: Gradients) -> None:
        """Of one micro-batch, a piece of its graph that lies outside of the blocks. ``gradients`` is emptied."""
        pairs = [(t, g) for t, g in zip(roots, gradients, strict=True) if t.requires_grad and g is not None]
        gradients.clear()
        if not pairs:
            return
        leaves = self._pieces.several(micro.number)
        totals = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = micro.apart.pop(id(leaf), None)
        found, seeds = zip(*pairs, strict=True)
        pairs.clear()
        torch.autograd.backward(found, seeds)
        for leaf, total in zip(leaves, totals, strict=True):
            mine = leaf.grad
            if self._pieces.done_in(leaf) != piece:
                micro.apart[id(leaf)], leaf.grad = mine, total
            elif total is not None:
                leaf.grad = total
                if mine is not None:
                    with torch.no_grad():
                        total.add_(mine)

    # -- the end -------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._handle._allocator.ended()
        for interpreter in self._interpreters:
            interpreter.close()
        self._interpreters.clear()
        self._micros.clear()
        try:
            while self._parcels:
                self._parcels.pop().close()
        finally:
            self._store.settle()
