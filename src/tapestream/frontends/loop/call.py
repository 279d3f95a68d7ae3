"""One live call of a loop whose number of steps is known."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tapestream.capture.buffers import BufferSnapshot
from tapestream.capture.cells import Contents
from tapestream.errors import GradientError
from tapestream.executor.engine import Engine
from tapestream.executor.loop.states import ParcelStates
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.traits import Body
from tapestream.frontends.giving_way import Awaiting, Reason
from tapestream.frontends.loop.inputs import Inputs
from tapestream.frontends.loop.outputs import Collected
from tapestream.frontends.loop.progress import Progress
from tapestream.frontends.loop.watch import copied
from tapestream.frontends.together import Key, Together, region_of_autocast
from tapestream.ir.actions import PhaseKind
from tapestream.ir.schedule import Schedule
from tapestream.runner.ambient import Autocast, as_recompute, unchanged_generators
from tapestream.runner.belongings import unchanged
from tapestream.runner.counts import Counted, digest_of, kinds_of
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import hooks_off
from tapestream.runner.kernels import algorithms_not_tried
from tapestream.runner.modes import Surroundings, as_a_stage
from tapestream.runner.stage import Stage
from tapestream.runner.stills import Look

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Task:
    """What a call is about: the loop's body, its initial and a later state; where inputs, outputs, progress go; the
    step, with the modules that it was seen to call."""

    body: Body
    state: Any
    source: Inputs | None
    sink: Collected | None
    progress: Progress | None
    later: Any = None
    stage: Stage | None = None
    runner: Callable[..., TensorSteps] = TensorSteps

    def inputs(self) -> list[torch.Tensor]:
        """What the call's node hangs on: leaves of the state, parameters and captured tensors, inputs."""
        leaves = self.body.form.leaves(self.state)
        given = () if self.source is None else self.source.tensors
        return [*(leaves[i] for i in self.body.form.tensors), *self.body.traits.leaves, *given]


class TensorCall:
    """See `node.Call`. ``held`` is called once, when nothing is held any more."""

    def __init__(self, task: Task, schedule: Schedule | None, steps: int | None, held: Callable[[], None]) -> None:
        self.task, self._schedule, self.steps, self._held = task, schedule, steps, held
        self.autocast = Autocast.capture(task.body.device)
        self._stage = task.stage or Stage(0, task.body.function)
        self._modules = self._stage.modules
        self._seen: Look | None = None
        self._surrounded = Surroundings(on_cpu=task.body.device.type == "cpu")
        self.runner: TensorSteps | None = None
        self.engine: Engine | None = None
        self.states: ParcelStates | None = None
        self.together: Together | None = None
        self.given_up: Reason | None = None
        self.awaiting: Awaiting | None = None
        casts = any(dtype != task.body.traits.leaves[i].dtype for i, dtype in task.body.traits.stand_ins)
        self._region = region_of_autocast(task.body.device) if casts else None
        self.rebuild: Callable[[Sequence[torch.Tensor]], Any] = lambda tensors: tensors

    def using(self, states: ParcelStates | None) -> "TensorCall":
        """The same with tiers below the device."""
        self.states = states
        return self

    def run(self) -> tuple[list[torch.Tensor], list[bool]]:
        """The forward phase."""
        try:
            with self._autocast(), algorithms_not_tried(self.task.body.device):
                self.runner = self.task.runner(self.task.body, self.steps, self.task.progress)
                state, before = self.runner.keeper.own(self.runner.detached(self.task.state)), self._look()
                final = self._forward(self.runner, state)
                self.runner.keeper.end_forward()  # now: what the generators do until the backward is the user's
                out = self._result(self.runner, final)
                self._seen = self._look()
                self._check_counts(before, self._seen)
                return out
        except BaseException:
            self.release()
            raise

    def _forward(self, runner: TensorSteps, state: Any) -> Any:
        assert self._schedule is not None
        self.engine = engine = Engine(self._schedule, runner, states=self.states)
        if self.states is not None:
            self.states.kept = engine.kept
        engine.begin(state)
        engine.run_phase(PhaseKind.FORWARD)
        return engine.hand_over(engine.stages)

    def _result(self, runner: TensorSteps, final: Any) -> tuple[list[torch.Tensor], list[bool]]:
        """The tensors to return, each once and none that anything here holds (it would hold the node)."""
        form, sink = self.task.body.form, self.task.sink
        leaves = list(form.leaves(final))
        at = {id(leaves[i]): i for i in reversed(form.tensors)}
        order = sorted(at.values())
        out = [torch.as_tensor(leaves[i], device=self.task.body.device).detach() for i in order]
        traits = runner.traits
        requires = [traits.requires[i] for i in order]
        place = {i: order.index(at[id(leaves[i])]) for i in form.tensors}
        for i in form.tensors:
            leaves[i] = None
        rows, build = ([], None) if sink is None else sink.take(self.steps or 0)
        self._places = order
        states = len(out)

        def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
            state = form.build([tensors[place[i]] if i in place else leaf for i, leaf in enumerate(leaves)])
            return state if build is None else (state, build(tensors[states:]))

        self.rebuild = rebuild
        return [*out, *rows], [*requires, *traits.outputs_require[: len(rows)]]

    def differentiate(self, cotangents: Gradients) -> Gradients:
        """The backward phase."""
        if self.awaiting is not None:
            self.awaiting.ends(self)
        runner, engine, task = self.runner, self.engine, self.task
        assert runner is not None
        assert engine is not None
        arrived: list[torch.Tensor | None] = [None] * len(task.body.form.parts)
        for place, cotangent in zip(self._places, cotangents, strict=False):
            arrived[place] = cotangent
        if task.sink is not None:
            task.sink.arrived(cotangents[len(self._places) :])
        if not (self._surrounded.hold() and Autocast.capture(task.body.device) == self.autocast):
            runner.reversing = self._as_now()
        hooks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._seen is not None:
            written = task.body.traits.buffers
            hooks = self._stage.stills.check("a step of the loop", self._seen, self._look(), written)
        with hooks, self._recomputing():
            runner.begin_backward()
            self._go_on(runner)
            engine.cotangents[engine.stages] = arrived
            engine.run_phase(PhaseKind.BACKWARD)
            initial = engine.cotangents.pop(0)
            runner.end_backward()
        if task.progress is not None:
            task.progress.end()
        of_inputs = () if task.source is None else task.source.gradients
        return [*self._left(runner, initial), *of_inputs]

    def adds_to(self) -> set[Key]:
        """See `together.Open`."""
        traits, keys = self.task.body.traits, self._keys
        several = traits.used_again if self.steps == 1 else range(len(traits.leaves))
        leaves = self.task.body.form.leaves(self.task.state)
        return {key for i in several if (key := keys[i]) is not None} | {
            (id(leaves[i]),) for i in traits.state_used_again
        }

    def _go_on(self, runner: TensorSteps) -> None:
        """Where other calls in this backward have used the same tensors, sums begin with theirs."""
        together, traits = self.together, self.task.body.traits
        if together is None or not together.sums:
            return
        runner.sums = [together.take(key) for key in self._keys]
        leaves = self.task.body.form.leaves(self.task.state)
        states = {i: together.take((id(leaves[i]),)) for i, needed in enumerate(traits.requires_first) if needed}
        runner.begun = {i: total for i, total in states.items() if total is not None}

    def _left(self, runner: TensorSteps, initial: Gradients) -> Iterator[torch.Tensor | None]:
        """Gradients of the initial state and of what is captured, but for those with which another call goes on."""
        together, form = self.together, self.task.body.form
        assert together is not None
        leaves = form.leaves(self.task.state)
        for i in form.tensors:
            gradient, before = initial[i], runner.begun.pop(i, None)
            if before is not None:  # the first step has no graph of its own in which it could enter
                gradient = before if gradient is None else before + gradient
            yield together.left((id(leaves[i]),), gradient)
        for leaf, key, total in zip(self.task.body.traits.leaves, self._keys, runner.sums, strict=True):
            gradient = together.left(key, total)
            yield None if gradient is None else gradient.to(leaf.dtype)

    @property
    def _keys(self) -> list[Key | None]:
        """Which sum is that of each tensor that the step captures; None for one of this call alone."""
        traits, region = self.task.body.traits, self._region
        keys: list[Key | None] = [(id(leaf),) for leaf in traits.leaves]
        for i, dtype in traits.stand_ins:
            if dtype != traits.leaves[i].dtype:
                keys[i] = None if region is None else (id(traits.leaves[i]), id(region), id(dtype))
        return keys

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        traits, device = self.task.body.traits, self.task.body.device
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_recompute())
            stack.enter_context(self._surrounded.again())
            stack.enter_context(algorithms_not_tried(device))
            stack.enter_context(unchanged_generators(device, traits.generators))
            stack.enter_context(self._autocast())
            stack.enter_context(hooks_off(traits.leaves))
            if traits.leaves_behind:
                stack.enter_context(unchanged(self._modules, self.task.body.function))
            if traits.buffers:
                stack.enter_context(BufferSnapshot.take(traits.buffers).substituted())
            if traits.cells:
                stack.enter_context(Contents.take(traits.cells).exchanged())
            yield

    def _look(self) -> Look:
        traits = self.task.body.traits
        return self._stage.stills.look(self.task.body.function, traits.buffers, traits.cells)

    def _check_counts(self, before: Look, after: Look) -> None:
        """Raise GradientError where a step reads what it has counted in this first run: each recompute would need the
        value of its own step."""
        task, stills = self.task, self._stage.stills
        late = stills.counted(before, after, task.body.traits.buffers)
        if late is None or kinds_of(late.slots) in stills.counts:
            return
        counted, found = Counted.since(late), []
        given = () if task.source is None else (next(iter(task.source.read(0, 1))),)
        for held in (counted.before, counted.after):
            with self._recomputing(), as_a_stage(task.body.device), held.substituted():
                state, _ = copied(task.body.form, task.state, task.body.traits.requires, root_of_graph())
                out = task.body.function(state, *given)
            found.append(digest_of([one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]))
        if found[0] != found[1]:
            raise GradientError(
                f"Loop: a step counts {counted.names} where tapestream.recomputing() is false, and reads it: a "
                "recompute would not find the value of its step; make it a part of the state, or use the step's number "
                "(inputs=range(steps))"
            )
        stills.learn(kinds_of(late.slots), after=False)

    def _as_now(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Enters again what holds here: in plain PyTorch, kernels of backward are chosen, and cast, by that."""
        device = self.task.body.device
        autocast, surrounded = Autocast.capture(device), Surroundings(on_cpu=device.type == "cpu")

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            with surrounded.again(), casting(autocast, device):
                yield

        return enter

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return casting(self.autocast, self.task.body.device)

    def give_way(self, reason: Reason) -> None:
        """See `giving_way.GivesWay`."""
        self.given_up = reason
        self.release()

    def release(self) -> None:
        """Drop what is held, once."""
        if self.awaiting is not None:
            self.awaiting.ends(self)
        engine, self.runner, self.engine = self.engine, None, None
        if engine is not None:
            engine.close()
        if self.states is not None:
            self.states.close()
        held, self._held = self._held, _nothing
        held()

    def __del__(self) -> None:
        self.release()


def casting(autocast: Autocast, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """``autocast`` without its cache: casts made without gradients must not be found by a step that is recorded."""
    if autocast.enabled or Autocast.capture(device) != autocast:
        return autocast.entered(cache=False)
    return contextlib.nullcontext()


def _nothing() -> None:
    return None
