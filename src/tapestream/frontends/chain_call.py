"""One live call of a `Chain`, and the autograd node that stands for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.interpreter import Interpreter
from tapestream.frontends.giving_way import Reason
from tapestream.frontends.together import Key, Together, begun, opened
from tapestream.ir.actions import PhaseKind
from tapestream.planning.cache import Prepared
from tapestream.runner.ambient import Autocast
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.modes import with_tangents
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.state import State

if TYPE_CHECKING:
    from tapestream.frontends.chain import Chain


class Call:
    """One live call: the interpreter, and the bytes that it holds of the chain's budget until it dies."""

    def __init__(self, chain: "Chain", prepared: Prepared, initial: State, device: torch.device) -> None:
        run = prepared.run
        runner = Runner(run.stages, run.traits, device, once=prepared.once)
        self._seen = runner.seen  # until the forward has run
        self.below, parcels = chain._below_on(device), None
        if prepared.plan.simulation.bytes_moved:
            parcels = self.below.parcels((*initial.tensors, *prepared.leaves))
        self.parcels = parcels
        self.interpreter: Interpreter | None = Interpreter(
            run.schedule, runner, parcels=parcels, moving=prepared.moving
        )
        self.chain, self.prepared, self.initial = chain, prepared, initial
        self.first = chain.first_call()
        self.output: State | None = None
        self.together: Together | None = None
        self.given_up: Reason | None = None
        self._autocast = Autocast.capture(device).enabled  # casts are added up, and cast back once
        self._inputs: dict[int, torch.Tensor] = {}
        self._held = True
        self._count(+1)
        chain.awaiting.begins(self)

    def given(self, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors of the initial state, with their graph."""
        repeated = () if self._autocast else self.prepared.inputs_repeated
        # Held, so that no other tensor gets the id of one.
        self._inputs = {i: tensors[i] for i in repeated if self.initial.requires[i]}

    def adds_to(self) -> set[Key]:
        """See `together.Open`."""
        several = frozenset[int]() if self._autocast else self.prepared.several
        return {(key,) for key in (*several, *map(id, self._inputs.values()))}

    def run(self) -> State:
        """The forward phase."""
        interpreter, first = self.interpreter, self.first
        assert interpreter is not None
        try:
            run = partial(self._run_forward, interpreter)
            seen, self._seen = self._seen, {}
            out = run() if first is None else first.forward(run, seen)
        except BaseException:
            self.release()
            raise
        if out.spec != self.prepared.output.spec:
            raise InputError(
                f"{self.chain._stages[-1].name} returned another structure ({out.spec}) than when it was profiled "
                f"({self.prepared.output.spec}); a stage must return the same structure for the same shapes"
            )
        # The structure alone: tensors that a node's own call holds would keep the node alive for ever.
        self.output = replace(out, tensors=())
        return out

    def differentiate(self, cotangents: Gradients) -> tuple[Gradients, dict[int, torch.Tensor | None]]:
        """The backward phase: cotangents of the initial state, gradients by id of leaf; none of what another call of
        this backward goes on with."""
        interpreter, self.interpreter = self.interpreter, None
        if interpreter is None:
            raise GradientError(
                "this chain was differentiated a second time, but its tape is gone after one backward "
                "(retain_graph=True is not supported); call the chain again"
            )
        together = self.together
        assert together is not None
        self.chain.awaiting.ends(self)
        try:
            for leaf in self.prepared.leaves if together.sums else ():
                if (begun := together.take((id(leaf),))) is not None:
                    interpreter.sums[id(leaf)] = leaf, begun
            run = partial(self._run_backward, interpreter, cotangents)
            given = run() if self.first is None else self.first.backward(run, interpreter.sums)
            for i, tensor in self._inputs.items():
                given[i] = together.left((id(tensor),), given[i])
        finally:
            interpreter.close()
            self.release()
        totals: dict[int, torch.Tensor | None] = {  # `to` takes ten times as long as to see that it has nothing to do
            key: g if g.dtype is leaf.dtype else g.to(leaf.dtype) for key, (leaf, g) in interpreter.sums.items()
        }
        if together.waiting:
            totals = {key: together.left((key,), total) for key, total in totals.items()}
        return given, totals

    def begun(self, i: int) -> torch.Tensor | None:
        """Where the sum of the gradients of tensor ``i`` of the initial state begins."""
        tensor, together = self._inputs.get(i), self.together
        return None if tensor is None or together is None else together.take((id(tensor),))

    def _run_forward(self, interpreter: Interpreter) -> State:
        interpreter.begin(self.initial)
        interpreter.run_phase(PhaseKind.FORWARD)
        state: State = interpreter.hand_over(interpreter.stages)
        return state

    def _run_backward(self, interpreter: Interpreter, cotangents: Gradients) -> Gradients:
        interpreter.cotangents[interpreter.stages] = cotangents
        if self._inputs:
            interpreter.segments.begun = lambda k: (
                [] if k else [self.begun(i) for i in range(len(self.initial.tensors))]
            )
        interpreter.run_phase(PhaseKind.BACKWARD)
        found: Gradients = interpreter.cotangents[0]
        return found

    def release(self) -> None:
        """Give the budget back and drop what is held."""
        self._inputs = {}
        self.chain.awaiting.ends(self)
        if self._held:
            self._held = False
            self._count(-1)
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None

    def give_way(self, reason: Reason) -> None:
        """See `giving_way.GivesWay`."""
        self.given_up = reason
        self.release()

    def _count(self, calls: int) -> None:
        for tier, nbytes in self.prepared.plan.simulation.peak_nbytes.items():
            self.chain._live[tier] += calls * nbytes

    def __del__(self) -> None:
        if getattr(self, "_held", False):  # False: made in part only
            self._count(-1)
            if self.parcels is not None:
                self.below.leave(self.parcels)


class ChainNode(torch.autograd.Function):
    """The one autograd node of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, states: int, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.states = call, states
        ctx.leaves = [id(leaf) for leaf in inputs[states:]]
        with with_tangents(), reentrant_checkpointing_off():
            out = call.run()
        call.given(inputs[:states])
        opened(ctx)
        ctx.mark_non_differentiable(*(t for t, requires in zip(out.tensors, out.requires, strict=True) if not requires))
        return out.tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        check_differentiated_once("this chain", "call its stages one after the other without the chain")
        ctx.call.together = begun(ctx, ctx.call)
        with reentrant_checkpointing_off():
            given, sums = ctx.call.differentiate(list(cotangents))
        return (None, None, *given, *(sums.get(key) for key in ctx.leaves))
