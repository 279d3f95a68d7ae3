"""`Loop`: one step applied again and again, differentiated within a budget whatever the number of steps."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tapestream.costs import Budget, Machine
from tapestream.errors import InputError
from tapestream.executor.engines import EngineStatistics
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.states import ParcelStates
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.traits import Body, StepTraits
from tapestream.frontends.around import check_around, check_uncovered, uncompiled
from tapestream.frontends.below import NEVER_MOVE, Below, check_home
from tapestream.frontends.given import check_kinds, check_knobs
from tapestream.frontends.giving_way import Awaiting
from tapestream.frontends.loop import arrays
from tapestream.frontends.loop.arguments import check_options, count_of, device_of, ended_by, fulfilled, whole
from tapestream.frontends.loop.call import Task, TensorCall
from tapestream.frontends.loop.compiled import Compiler, with_chunks
from tapestream.frontends.loop.costs import StepCost
from tapestream.frontends.loop.growth import Before, Growth, forward_seconds
from tapestream.frontends.loop.inline import run_inline
from tapestream.frontends.loop.inputs import source_of
from tapestream.frontends.loop.known import Cost, KnownSteps
from tapestream.frontends.loop.node import differentiable
from tapestream.frontends.loop.open_call import OpenCall, exhausted
from tapestream.frontends.loop.outputs import sink_of
from tapestream.frontends.loop.plans import Chosen, choose, given_plan, online_of, profile_of
from tapestream.frontends.loop.progress import Progress, progress_of
from tapestream.frontends.loop.threaded import looked_or_threaded
from tapestream.frontends.loop.tier_plans import check_room, choose_below
from tapestream.frontends.others import beside_others, left_on_device
from tapestream.frontends.reached import also_reached
from tapestream.planners.online import Online
from tapestream.planning.cache import Beside
from tapestream.planning.exceeded import Exceeded
from tapestream.planning.plan import Plan
from tapestream.runner.depth import SHALLOW
from tapestream.runner.graph import let_go_of_failed_backward
from tapestream.runner.nesting import covered, covering
from tapestream.runner.stage import Stage

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
        self.modules_of_step = also_reached([self._stage], nn.ModuleList())
        self.budget = Budget.of(budget)
        self.planner, self.chunk, self.verify = planner, chunk, verify
        self._adjoint = adjoint
        backend = "inductor" if compile is True else compile
        self._compiler = Compiler(backend) if backend else None
        check_home(home, folder, host=True)
        self._tiers: dict[str, Any] = {"home": home, "folder": folder, "machine": machine, "engine": engine}
        self._below: Below | None = None
        self._knobs, self._given, self._progress = knobs, plan, progress_of(progress)
        self._known = KnownSteps(self._stage, verify=verify)
        self._plans: dict[object, Beside[Chosen]] = {}
        self._live_nbytes = 0
        self.awaiting = Awaiting()
        self.exceeded = Exceeded("Loop")
        self.plan: Plan | None = plan

    def __getstate__(self) -> dict[str, Any]:
        # Costs are known by shapes and modes; live calls are this object's own.
        known = KnownSteps(self._stage, verify=self.verify)
        mine = {"_known": known, "_plans": {}, "_live_nbytes": 0, "awaiting": Awaiting(), "_below": None}
        return {**self.__dict__, **mine}

    @property
    def copies(self) -> EngineStatistics:
        """Since this was made: bytes moved per (source, target), number of copies, seconds of waiting for them."""
        return EngineStatistics({}, 0, 0.0) if self._below is None else self._below.statistics()

    @property
    def user_functions(self) -> tuple[Callable[..., Any], ...]:
        """Its step, and the step's adjoint."""
        return (self._stage.function,) if self._adjoint is None else (self._stage.function, self._adjoint)

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
        if torch.is_grad_enabled() and covered():
            if self._compiler is not None:
                check_uncovered("a compiled ts.Loop", "leave out compile=: the budget around it covers its steps")
            return run_inline(self._stage.function, state, source, sink, count, until)
        bare = Body(self._stage.function, form, StepTraits.bare(form), source, sink, device)
        task = Task(bare, state, source, sink, None)
        if not torch.is_grad_enabled():
            return self._plainly(task, count, until)
        check_around("Loop")
        looked = looked_or_threaded(self, task, inputs, outputs, every, count, until)
        if isinstance(looked, tuple):
            return looked[0]
        task = looked
        if not any(t.requires_grad for t in task.inputs()):
            return self._plainly(task, count, until)
        if self._compiler is None:
            cost = self._known.cost(task, count, until)
            task = replace(task, body=replace(task.body, beginning=cost.beginning))
            return self._within_budget(task, cost, count, until)
        return self._compiled(task, self._compiler, count, until)

    def _compiled(self, task: Task, compiler: Compiler, count: int | None, until: Condition | None) -> Any:
        """A call whose stages are compiled chunks."""
        if until is not None or count is None:
            raise InputError("Loop: a compiled loop cannot stop inside a chunk; give steps=, or compile=False")
        found = self._known.compiled(task, compiler, count, self.chunk)
        return self._within_budget(with_chunks(task, compiler, found), Cost(found.cost), count, None, found.length)

    def _within_budget(self, task: Task, cost: Cost, count: int | None, until: Condition | None, unit: int = 1) -> Any:
        """A differentiable call, its stages multiples of ``unit`` steps."""
        if until is not None:
            return self._openly(task, cost, count, until)
        assert count is not None
        while True:
            chosen = self._chosen(cost.step, count, task.body, unit)
            self.plan = chosen.plan
            planned = chosen.plan.profile.stages[0], chosen.plan.peak_nbytes, forward_seconds(chosen.plan)
            limit = None if self._given is not None else chosen.plan.budget.device_nbytes
            growth = Growth.of(task, cost, planned, limit, self.exceeded, strict=self.verify)
            if growth is None:
                return self._closed(task, chosen, count)
            before = Before.take(task.body, growth.limit_nbytes - growth.planned_nbytes)
            found = self._closed(replace(task, runner=growth.steps), chosen, count)
            again = growth.begin_again(task, before) if growth.exceeds else None
            if again is None:
                return found
            del found
            task = again

    def _closed(self, task: Task, chosen: Chosen, count: int) -> Any:
        task = replace(task, body=replace(task.body, chunk=chosen.chunk), progress=self._progressing(chosen))
        call = TensorCall(task, chosen.plan.schedule, count, self._holding(chosen.plan.peak_nbytes))
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
        task = Task(body, arrays.as_tensors(state), source, None, None, runner=arrays.runner_with(adjoint))
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in task.inputs())
        if not wanted:
            found = self._plainly(replace(task, state=arrays.as_arrays(state)), count, until)
            return arrays.as_tensors(found) if arrays.has_tensors(state) else found
        task, cost = arrays.looked(task, self._stage, adjoint, count, self.verify)
        return self._within_budget(task, Cost(cost), count, until)

    def _chosen(self, cost: StepCost, count: int, body: Body, unit: int) -> Chosen:
        device = body.device
        # What is looked at, as the graph of a stage is, may not be too deep; a compiled unit is one node.
        most = max(1, SHALLOW // 2 // (body.traits.nodes if unit == 1 else 1)) * unit
        chunk = self.chunk and max(1, self.chunk // unit) * unit
        if self._given is not None:
            return given_plan(self._given, cost, count, self._room(device, self._waiting_nbytes))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        planned = self._plans.setdefault((cost, count, unit, most), Beside())

        def beside(live: Callable[[], int]) -> Chosen:
            room = self._room(device, live)
            found = planned.find((live(),), lambda: room)
            # Where the user names no budget, what is free now moves all the time.
            if found is None or found.plan.peak_nbytes > (room.device_nbytes or 0):
                below = self._below_on(device)
                asked = room, self.planner, chunk, self._knobs
                with beside_others("Loop", live(), self.budget):
                    if below.tiers and self.planner not in NEVER_MOVE:
                        found = choose_below(cost, count, below.machine(), *asked, unit=unit, most=most)
                    else:
                        found = choose(cost, count, *asked, unit=unit, most=most)
                planned.add((live(),), found)
            return found

        return self.awaiting.planned(lambda: beside(self._waiting_nbytes), lambda: beside(_none))

    def _waiting_nbytes(self) -> int:
        return self._live_nbytes

    def _room(self, device: torch.device, live: Callable[[], int]) -> Budget:
        if live():
            let_go_of_failed_backward()
        return Budget(left_on_device("Loop", self.budget, live(), device))

    def _holding(self, nbytes: int) -> Callable[[], None]:
        """Take bytes of the budget; what is returned gives them back."""
        self._live_nbytes += nbytes

        def give_back() -> None:
            self._live_nbytes -= nbytes

        return give_back

    def _called(self, call: TensorCall) -> Any:
        call.awaiting = self.awaiting
        self.awaiting.begins(call)
        inputs = call.task.inputs()
        out = differentiable(call, inputs)
        return call.rebuild(out)

    @covering()
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

    def _openly(self, task: Task, cost: Cost, count: int | None, until: Condition) -> Any:
        """A run of unknown length."""
        if self._given is not None:
            raise InputError(
                "Loop: plan= is for a known number of steps, but until= was given; use steps=, or plan=None"
            )

        def beside(live: Callable[[], int]) -> tuple[Budget, tuple[Online, int, int]]:
            room = self._room(task.body.device, live)
            with beside_others("Loop", live(), self.budget):
                return room, online_of(cost.step, room, self.planner, self.chunk, self._knobs)

        room, (online, chunk, nbytes) = self.awaiting.planned(
            lambda: beside(self._waiting_nbytes), lambda: beside(_none)
        )
        progress = None if self._progress is None else Progress(self._progress, None)
        planned = profile_of(cost.step, chunk, chunk).stages[0], nbytes, 0.0
        growth = Growth.of(task, cost, planned, room.device_nbytes, self.exceeded, strict=self.verify)
        runner = task.runner if growth is None else growth.steps
        task = replace(task, body=replace(task.body, chunk=chunk), progress=progress, runner=runner)
        return self._called(OpenCall(task, online, until, count, self._holding(nbytes)))

    def _progressing(self, chosen: Chosen) -> Progress | None:
        of = chosen.plan.simulation.forwards * chosen.chunk
        return None if self._progress is None else Progress(self._progress, of)


def _none() -> int:
    return 0
