"""`Loop`: one step applied again and again, differentiated within a budget whatever the number of steps."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tapestream.costs import Budget, Machine, StageCost
from tapestream.errors import InputError
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.states import ParcelStates
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.sweep import NAME, paired
from tapestream.executor.loop.traits import Body, StepTraits
from tapestream.frontends.around import check_around, uncompiled
from tapestream.frontends.below import NEVER_MOVE, Below, check_home
from tapestream.frontends.given import check_kinds, check_knobs
from tapestream.frontends.loop import arrays
from tapestream.frontends.loop.arguments import (
    check_options,
    count_of,
    device_of,
    ended_by,
    fulfilled,
    roots_of,
    whole,
)
from tapestream.frontends.loop.call import Task, TensorCall, casting
from tapestream.frontends.loop.compiled import LONGEST, Compiler, Measured, measured, with_chunks
from tapestream.frontends.loop.costs import cost_of
from tapestream.frontends.loop.inputs import source_of
from tapestream.frontends.loop.look import look_at
from tapestream.frontends.loop.node import differentiable
from tapestream.frontends.loop.open_call import OpenCall, exhausted
from tapestream.frontends.loop.outputs import check_tensors, sink_of
from tapestream.frontends.loop.plans import Chosen, choose, given_plan, online_of
from tapestream.frontends.loop.progress import Progress, progress_of
from tapestream.frontends.loop.tier_plans import check_room, choose_below
from tapestream.frontends.others import beside_others, left_on_device
from tapestream.planning.plan import Plan
from tapestream.runner.ambient import Autocast
from tapestream.runner.belongings import unchanged
from tapestream.runner.depth import SHALLOW
from tapestream.runner.graph import let_go_of_failed_backward
from tapestream.runner.passable import check_modules
from tapestream.runner.stage import Stage, mode_of

Condition = Callable[[Any], Any]
_MOST_PLANS = 16


class Loop(nn.Module):
    """``step`` applied again and again: ``state = run(state, steps=1_000_000)``, differentiable in ``budget`` bytes.

    ``step(state)`` or ``step(state, x)`` returns the next state: a tensor or any pytree of tensors, numbers and flags.
    Its structure, shapes and dtypes stay the same. Gradients reach the initial state, the inputs, parameters of modules
    and tensors that the step captures. They equal those of a plain Python loop bit for bit.

    ``budget``: bytes that may be held beyond arguments, parameters and result (``"64MiB"``, int, Budget; None: what is
    free now, less 5%). ``planner``: a name in `tapestream.planners` with its ``knobs``, or "auto". ``chunk``: steps
    that are recorded at once (None: 1 for a named planner, the fastest number for "auto"). ``compile=True``: chunks of
    steps go through ``torch.compile`` (a string names its backend), and gradients equal those of the compiled step.
    ``adjoint(state, cotangent)`` returns the cotangent of the state before the step; ``step`` is then given NumPy
    arrays in place of tensors, and autograd is not used inside. ``plan``: a Plan to use as it is, so that several
    processes agree. ``verify=True`` runs the first step twice and compares. ``progress``: True for a line on standard
    error, or a function of (done, of, seconds_left). ``folder`` (on a GPU also host memory), ``home``, ``machine``,
    ``engine``: where restart checkpoints may go beside the device, as in `Chain`.

    Raises BudgetError if no plan fits, InputError for steps and arguments that cannot be used, GradientError if a
    gradient would be wrong.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        budget: Budget | str | int | None = None,
        planner: str = "auto",
        compile: bool | str = False,
        chunk: int | None = None,
        adjoint: Callable[..., Any] | None = None,
        plan: Plan | None = None,
        verify: bool = False,
        progress: bool | Callable[[int, int | None, float | None], object] | None = None,
        folder: str | os.PathLike[str] | None = None,
        home: str = "auto",
        machine: Machine | None = None,
        engine: str = "auto",
        **knobs: Any,
    ) -> None:
        super().__init__()
        if not callable(step):
            raise InputError(f"Loop: the step must be a module or function, found {type(step).__name__}")
        if chunk is not None:
            chunk = whole("chunk", chunk, 1)
        check_options(adjoint, plan, compile)
        check_kinds(engine, machine, plan, verify=verify)
        check_knobs("Loop", Loop.__init__, planner, knobs, also=("slots", "rule"))  # where its length is not known
        self._stage = Stage(0, step)
        self.modules_of_step = nn.ModuleList(roots_of(self._stage.modules))
        self.budget = Budget.of(budget)
        self.planner, self.chunk, self.verify = planner, chunk, verify
        self._adjoint = adjoint
        backend = "inductor" if compile is True else compile
        self._compiler = Compiler(backend) if backend else None
        check_home(home, folder, host=True)
        self._tiers: dict[str, Any] = {"home": home, "folder": folder, "machine": machine, "engine": engine}
        self._below: Below | None = None
        self._knobs, self._given, self._progress = knobs, plan, progress_of(progress)
        self._costs: dict[object, StageCost] = {}
        self._measured: dict[object, Measured] = {}
        self._plans: dict[object, Chosen] = {}
        self._live_nbytes = 0
        self.plan: Plan | None = plan

    def __getstate__(self) -> dict[str, Any]:
        # Costs are known by shapes and modes; live calls are this object's own.
        return {**self.__dict__, "_costs": {}, "_measured": {}, "_plans": {}, "_live_nbytes": 0, "_below": None}

    @uncompiled
    def forward(
        self,
        state: Any,
        steps: int | None = None,
        *,
        inputs: Any = None,
        outputs: str | Callable[[Any], object] | None = None,
        every: int = 1,
        until: Condition | None = None,
        max_steps: int | None = None,
    ) -> Any:
        """The state after ``steps`` steps, or after the first step whose state fulfils ``until``.

        ``inputs``: a tensor or (memory-mapped) NumPy array with a row for each step, a function of the step's number,
        or a range; step t is called with row t. Without ``steps``, there are as many steps as rows. ``outputs``: the
        step returns (state, output), and the call returns (state, outputs of every ``every``-th step). "stack" makes
        one tensor of the outputs, and "sum" adds them up one after the other; None if none was taken. A function is
        called with each output, and what it returns is collected in a list; no gradient flows through that.
        ``max_steps``: InputError if so many steps do not fulfil ``until``.
        """
        if self._adjoint is not None:
            return self._adjointly(self._adjoint, state, steps, inputs, outputs, until, max_steps)
        form = Form.of(state)
        device = device_of(form, state, self._stage.modules)
        source = source_of(inputs, device)
        count = count_of(steps, source, until, max_steps)
        sink = sink_of(outputs, every, count if until is None else None)
        if count == 0 or (until is not None and fulfilled(until, state)):
            return state if sink is None else (state, [] if callable(sink.how) else None)
        bare = Body(self._stage.function, form, StepTraits.bare(form), source, sink, device)
        task = Task(bare, state, source, sink, (), None)
        if not torch.is_grad_enabled():
            return self._plainly(task, count, until)
        check_around("Loop")
        task = self._looked(task, count, until)
        if not any(t.requires_grad for t in task.inputs()):
            return self._plainly(task, count, until)
        if self._compiler is None:
            return self._within_budget(task, self._cost(task, count, until), count, until)
        return self._compiled(task, self._compiler, count, until)

    def _compiled(self, task: Task, compiler: Compiler, count: int | None, until: Condition | None) -> Any:
        """A call whose stages are compiled chunks."""
        if until is not None or count is None:
            raise InputError("Loop: a compiled loop cannot stop inside a chunk; give steps=, or compile=False")
        key = self._key(task), min(count, LONGEST)
        if key not in self._measured:
            self._measured[key] = measured(task, self._stage, compiler, count, self.chunk)
        found = self._measured[key]
        return self._within_budget(with_chunks(task, compiler, found), found.cost, count, None, found.length)

    def _within_budget(
        self, task: Task, cost: StageCost, count: int | None, until: Condition | None, unit: int = 1
    ) -> Any:
        """A differentiable call, its stages multiples of ``unit`` steps."""
        if until is not None:
            return self._openly(task, cost, count, until)
        assert count is not None
        # What is looked at, as the graph of a stage is, may not be too deep; a compiled unit is one node.
        most = max(1, SHALLOW // 2 // (task.body.traits.nodes if unit == 1 else 1)) * unit
        chosen = self._chosen(cost, count, task.body.device, unit, most)
        self.plan = chosen.plan
        task = replace(task, body=replace(task.body, chunk=chosen.chunk), progress=self._progressing(chosen))
        call = TensorCall(task, chosen.orders, count, self._holding(chosen.plan.peak_nbytes))
        below = self._below_on(task.body.device)
        moves = any(chosen.plan.simulation.bytes_moved.values())
        check_room(self._tiers["folder"], chosen.plan.simulation)
        states = ParcelStates(below.parcels(task.inputs()), task.body.form) if moves else None
        return self._called(call.using(states))

    def _below_on(self, device: torch.device) -> Below:
        if self._below is None or self._below.device != device:
            self._below = Below(device, budget=self.budget, **self._tiers)
        return self._below

    def _adjointly(
        self, adjoint: Callable[..., Any], state: Any, steps: int | None, inputs: Any, outputs: object,
        until: Condition | None, max_steps: int | None,
    ) -> Any:  # fmt: skip
        """A call with NumPy arrays inside."""
        if outputs is not None:
            raise InputError("Loop: adjoint= does not support outputs=; make the output a part of the state")
        cpu = torch.device("cpu")
        source = arrays.source_of_arrays(inputs)
        count = count_of(steps, source, until, max_steps)
        if count == 0 or (until is not None and fulfilled(until, arrays.as_arrays(state))):
            return state
        form = Form.of(arrays.as_arrays(state))
        body = Body(self._stage.function, form, StepTraits.bare(form), source, None, cpu)
        task = Task(body, arrays.as_tensors(state), source, None, (), None, runner=arrays.runner_with(adjoint))
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in task.inputs())
        if not wanted:
            found = self._plainly(replace(task, state=arrays.as_arrays(state)), count, until)
            return arrays.as_tensors(found) if arrays.has_tensors(state) else found
        return self._within_budget(*arrays.looked(task, self._stage, adjoint, count, self.verify), count, until)

    def _looked(self, task: Task, count: int | None, until: Condition | None) -> Task:
        """The task with what watching two steps shows."""
        check_modules(NAME, self._stage.modules)
        body, most = task.body, 2 if count is None else min(count, 2)
        given = [(x,) for x in body.source.read(0, most)] if body.source is not None else [()] * most
        split = _alone if task.sink is None else paired
        with casting(Autocast.capture(body.device), body.device), _uncounted(until):
            look = look_at(
                self._stage, task.state, body.form, given, split, body.device,
                ended=ended_by(until), verify=self.verify,
            )  # fmt: skip
        if task.sink is not None:
            task.sink.form = Form.of(look.output, "output")
            check_tensors(task.sink, task.sink.form)
        body = replace(body, traits=look.traits)
        return replace(task, body=body, output_requires=look.output_requires, later=look.state, stage=self._stage)

    def _cost(self, task: Task, count: int | None, until: Condition | None) -> StageCost:
        """What one step costs, measured once for each combination of shapes and modes."""
        key = self._key(task), count == 1
        if key not in self._costs:
            with casting(Autocast.capture(task.body.device), task.body.device), _uncounted(until):
                self._costs[key] = cost_of(self._stage, task.body, task.later, count, ended=ended_by(until))
        return self._costs[key]

    def _key(self, task: Task) -> object:
        """What a step's cost depends on."""
        form, traits = task.body.form, task.body.traits
        leaves = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in traits.leaves)
        return (
            tuple(map(str, form.parts)), str(form.spec), traits.requires, traits.sweep, traits.stand_ins, leaves,
            mode_of(list(self._stage.modules)), Autocast.capture(task.body.device), task.body.device,
            task.sink is not None,
        )  # fmt: skip

    def _chosen(self, cost: StageCost, count: int, device: torch.device, unit: int, most: int) -> Chosen:
        room, chunk = self._room(device), self.chunk and max(1, self.chunk // unit) * unit
        if self._given is not None:
            return given_plan(self._given, cost, count, room)
        # Where the user names no budget, what is free now moves all the time.
        key = (cost, count, unit, most, room if self.budget.device_nbytes is not None else None)
        found = self._plans.get(key)
        if found is None or found.plan.peak_nbytes > (room.device_nbytes or 0):
            below = self._below_on(device)
            asked = room, self.planner, chunk, self._knobs
            with beside_others("Loop", self._live_nbytes, self.budget):
                if below.tiers and self.planner not in NEVER_MOVE:
                    found = choose_below(cost, count, below.machine(), *asked, unit=unit, most=most)
                else:
                    found = choose(cost, count, *asked, unit=unit, most=most)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = found
        return found

    def _room(self, device: torch.device) -> Budget:
        if self._live_nbytes:
            let_go_of_failed_backward()
        return Budget(left_on_device("Loop", self.budget, self._live_nbytes, device))

    def _holding(self, nbytes: int) -> Callable[[], None]:
        """Take bytes of the budget; what is returned gives them back."""
        self._live_nbytes += nbytes

        def give_back() -> None:
            self._live_nbytes -= nbytes

        return give_back

    def _called(self, call: TensorCall) -> Any:
        inputs = call.task.inputs()
        out = differentiable(call, inputs)
        return call.rebuild(out)

    def _plainly(self, task: Task, count: int | None, until: Condition | None) -> Any:
        """The bare loop, for calls of which nobody wants a gradient."""
        progress = None if self._progress is None else Progress(self._progress, count if until is None else None)
        runner = TensorSteps(task.body, count, progress)
        if until is None:
            state = runner.plain(task.state, 0, count or 0)
        else:
            limit = 1 << 62 if count is None else count
            state = runner.plain(task.state, 0, limit, ended_by(until))
            if not runner.over:
                raise exhausted(limit)
        if progress is not None:
            progress.end()
        if task.sink is None:
            return state
        rows, build = task.sink.take(runner.reached)
        return state, build(rows)

    def _openly(self, task: Task, cost: StageCost, count: int | None, until: Condition) -> Any:
        """A run of unknown length."""
        if self._given is not None:
            raise InputError(
                "Loop: plan= is for a known number of steps, but until= was given; use steps=, or plan=None"
            )
        room = self._room(task.body.device)
        with beside_others("Loop", self._live_nbytes, self.budget):
            online, chunk, nbytes = online_of(cost, room, self.planner, self.chunk, self._knobs)
        progress = None if self._progress is None else Progress(self._progress, None)
        task = replace(task, body=replace(task.body, chunk=chunk), progress=progress)
        return self._called(OpenCall(task, online, until, count, self._holding(nbytes)))

    def _progressing(self, chosen: Chosen) -> Progress | None:
        of = chosen.plan.simulation.forwards * chosen.chunk
        return None if self._progress is None else Progress(self._progress, of)


def _uncounted(until: Condition | None) -> contextlib.AbstractContextManager[None]:
    """What a condition keeps (how long it has waited, say) is afterwards as before."""
    return contextlib.nullcontext() if until is None else unchanged(Stage(0, until).modules, until)


def _alone(found: Any, step: int) -> tuple[Any, None]:
    return found, None
