"""`Chain`: stages one after the other as one differentiable function under a budget."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tapestream.capture.cells import kept_nbytes
from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import GradientError, InputError
from tapestream.executor.engines import EngineStatistics
from tapestream.executor.interpreter import Interpreter
from tapestream.frontends.around import check_around, uncompiled
from tapestream.frontends.below import Below, check_home, check_lanes, plan_with
from tapestream.frontends.check import check_deterministic
from tapestream.frontends.given import (
    check_kinds,
    check_knobs,
    check_not_inference,
    fit_given_plan,
    is_device,
    listed,
    named_device,
)
from tapestream.frontends.others import beside_others, room_for_call
from tapestream.ir.actions import PhaseKind, Tier
from tapestream.planning.cache import PlanCache, Prepared
from tapestream.planning.plan import Plan
from tapestream.planning.profile import profile_stages, undisturbed, with_gradients
from tapestream.runner.ambient import as_recompute
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.graph import let_go_of_failed_backward
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.join import join, views_written, with_dense
from tapestream.runner.modes import with_tangents
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.stage import Mode, Stage, Traits, mode_of
from tapestream.runner.state import State, take_apart


class Chain(nn.Module):
    """``stages`` applied one after the other, differentiated within ``budget`` bytes.

    ``stages``: modules or functions from a state to the next one. A state is a tensor or any pytree of tensors.
    ``budget``: bytes that a call may hold beyond arguments, parameters with their gradients, and the result
    (``"512MiB"``, int, Budget; None: what is free now, less 5%). ``gradients_within=True``: the gradients that backward
    makes, of parameters (as if they had none before) and argument, count too; until they are made, plans use their room
    for the tape. ``planner``: a name in `tapestream.planners` or ``"auto"``; ``knobs`` are its options. ``plan``: a
    Plan to use as it is. ``device``: where inputs must lie (None: where the first one lies). ``verify=True``: the first
    call runs each stage twice, and raises GradientError if the two differ.

    ``folder``: a folder on disk. Plans may move restart checkpoints and saved tensors there while computation goes on.
    On a GPU they may move to host memory too, with or without a folder. This run's files lie in a subfolder of their
    own, which is deleted with the chain. ``home``: the slowest tier that may be used: ``"disk"``, ``"host"`` (GPU
    only), ``"device"`` (nothing moves) or ``"auto"``, the slowest there is. ``Budget(device=, host=, disk=)`` limits
    each. ``machine``: the speeds of the links (None: measured, in two seconds, when a plan depends on them).
    ``engine``: the name of a copy engine (``"adversarial"`` for tests). Parameters, arguments and what others hold
    never move.

    The first call with new shapes or modes makes a plan; later calls reuse it. If a stage writes into a view, and
    others use the tensor that the view shows, the stages from the one that made it run as one. Gradients equal plain
    PyTorch's bit for bit, with one exception: the parts of a parameter used twice inside the chain *and* outside it may
    be added in another order.

    Raises BudgetError if no plan fits, InputError for unusable stages, inputs, homes or knobs, StorageError if the disk
    is full or fails: that call is lost, and parameters and gradients are as before.
    """

    _fusing = True  # stages that a plan never parts may be run as one

    def __init__(
        self,
        stages: Sequence[Callable[[Any], Any]],
        *,
        budget: Budget | str | int | None = None,
        planner: str = "auto",
        device: torch.device | str | None = None,
        plan: Plan | None = None,
        verify: bool = False,
        gradients_within: bool = False,
        folder: str | os.PathLike[str] | None = None,
        home: str = "auto",
        machine: Machine | None = None,
        engine: str = "auto",
        **knobs: Any,
    ) -> None:
        super().__init__()
        stages = listed(type(self).__name__, stages)
        check_knobs(type(self).__name__, Chain.__init__, planner, knobs)
        check_kinds(engine, machine, plan, verify=verify, gradients_within=gradients_within)
        self.stages = nn.ModuleList(s for s in stages if isinstance(s, nn.Module))
        self._stages = [Stage(k, stage) for k, stage in enumerate(stages)]
        self._modules_behind = also_reached(self._stages, self.stages)
        self.budget = Budget.of(budget)
        self.planner, self.verify, self.gradients_within = planner, verify, gradients_within
        self._device = named_device(device)
        self._knobs, self._given, self._plans = knobs, plan, PlanCache()
        self._live = dict.fromkeys(Tier, 0)  # bytes of the budget that live calls hold
        check_home(home, folder, host=True)
        self._tiers: dict[str, Any] = {"folder": folder, "home": home, "machine": machine, "engine": engine}
        self._below: Below | None = None
        if plan is not None and plan.schedule.stages != len(stages):
            raise InputError(
                f"plan= was made for a chain of {plan.schedule.stages} stages, this one has {len(stages)}; "
                "make a plan for this chain (plan=None)"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Plans know this chain's tensors by identity, and live calls are its own: a copy starts without either.
        return {**self.__dict__, "_plans": PlanCache(), "_live": dict.fromkeys(Tier, 0), "_below": None}

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call. None before the first call that needs gradients."""
        return self._plans.last

    @property
    def copies(self) -> EngineStatistics:
        """Since this was made: bytes moved per (source, target), number of copies, seconds of waiting for them."""
        return EngineStatistics({}, 0, 0.0) if self._below is None else self._below.statistics()

    @uncompiled
    def forward(self, state: Any) -> Any:
        """The last state, differentiable like any other tensor."""
        initial, tensors = self._take_apart(state)
        device = self._check_device(initial)
        if not torch.is_grad_enabled():
            return self._plain(state)
        check_not_inference(type(self).__name__, tensors)
        check_around(type(self).__name__)
        with reentrant_checkpointing_off():
            prepared = self._prepare(initial, device)
        if not (any(initial.requires) or prepared.reaches_leaves or self._trainable()):
            return self._plain(state)
        call = self._call(prepared, initial, device)
        inputs = (*tensors, *prepared.leaves)
        out = _ChainNode.apply(call, len(tensors), *inputs)  # type: ignore[no-untyped-call]
        template = call.output
        assert template is not None
        return template.tree(out)

    def _take_apart(self, state: Any) -> tuple[State, tuple[torch.Tensor, ...]]:
        return take_apart(state)

    def _call(self, prepared: Prepared, initial: State, device: torch.device) -> "Call":
        return Call(self, prepared, initial, device)

    def _trainable(self) -> bool:
        return any(p.requires_grad for stage in self._stages for p in stage.parameters())

    def _plain(self, state: Any) -> Any:
        for stage in self._stages:
            state = stage.function(state)
        return state

    def _prepare(self, initial: State, device: torch.device) -> Prepared:
        if any(self._live.values()):
            let_go_of_failed_backward()
        live = tuple(self._live.values())
        found = self._plans.find(initial, self._mode(), device, live=live)
        if found is not None:
            return found
        if self.verify:
            with as_recompute():
                check_deterministic(self._stages, initial, device)
        profile, traits, last = self._profile(initial, device)
        profile = replace(profile, outside_nbytes=profile.outside_nbytes + kept_nbytes(t.cells for t in traits))
        if self.gradients_within:
            profile = with_gradients(profile, traits, initial)
        below, room = self._below_on(device), self._room(device)
        with beside_others(type(self).__name__, live[0], self.budget):
            if self._given is not None:
                plan = fit_given_plan(self._given, profile, room)
            else:
                plan = plan_with(below, profile, room, self.planner, self._knobs_for(traits, initial))
        check_lanes(plan, below)
        return self._plans.add(
            initial, self._mode(), device, plan, self._stages, traits, last, live=live, fusing=self._fusing
        )

    def _knobs_for(self, traits: Sequence[Traits], initial: State) -> dict[str, Any]:
        return self._knobs

    def _mode(self) -> Mode:
        return mode_of([module for stage in self._stages for module in stage.modules])

    def _profile(self, initial: State, device: torch.device) -> tuple[Profile, list[Traits], State]:
        """The stages' profile, after joining those that must be one."""
        return self._profile_part(slice(None), initial, device)

    def _profile_part(self, part: slice, initial: State, device: torch.device) -> tuple[Profile, list[Traits], State]:
        while True:
            stages = self._stages[part]
            profile, traits, last = profile_stages(stages, initial, device)
            if not any(trait.mutates for trait in traits[1:]):
                return profile, traits, last
            cells = [cell for trait in traits for cell in trait.cells]
            with as_recompute(), undisturbed(stages, device, cells=cells):
                written = views_written(stages, initial, device)
            if not written.stretches:
                return profile, with_dense(traits, written), last
            self._stages[part] = join(stages, written.stretches)
            self._plans.clear()  # their traits are of the stages before

    def _room(self, device: torch.device) -> Budget:
        """What other live calls leave of the budget."""
        host = self._below_on(device).host_nbytes()
        return room_for_call(type(self).__name__, self.budget, self._live, host, device)

    def _below_on(self, device: torch.device) -> Below:
        if self._below is None or self._below.device != device:
            self._below = Below(device, budget=self.budget, **self._tiers)
        return self._below

    def _check_device(self, state: State) -> torch.device:
        devices = {t.device for t in state.tensors}
        if not devices:
            raise InputError(f"{type(self).__name__}: the state holds no tensor; pass a tensor or a pytree of tensors")
        if len(devices) > 1 or (self._device is not None and not is_device(self._device, devices)):
            raise InputError(
                f"{type(self).__name__}: inputs lie on {', '.join(sorted(map(str, devices)))}, but "
                + ("must lie on one device" if self._device is None else f"device={str(self._device)!r} was asked for")
                + "; move them with .to(...)"
            )
        (device,) = devices
        for stage in self._stages:
            for p in [p for m in stage.modules for p in m._parameters.values() if p is not None]:
                if p.device != device:
                    raise InputError(
                        f"{stage.name} has parameters on {p.device} while its input lies on {device}; "
                        f"call .to({str(device)!r}) on the stages or move the input"
                    )
        return device


def also_reached(stages: Sequence[Stage], registered: nn.ModuleList) -> nn.ModuleList:
    """Modules that function stages reach: registered too, so that parameters(), state_dict() and train() find them."""
    known = {id(m) for m in registered.modules()}
    found: list[nn.Module] = []
    for stage in stages:
        for module in stage.modules:
            if id(module) not in known:
                known.update(id(m) for m in module.modules())
                found.append(module)
    return nn.ModuleList(found)


class Call:
    """One live call: the interpreter, and the bytes that it holds of the chain's budget until it dies."""

    def __init__(self, chain: Chain, prepared: Prepared, initial: State, device: torch.device) -> None:
        run = prepared.run
        runner = Runner(run.stages, run.traits, device, once=prepared.once)
        self.below, parcels = chain._below_on(device), None
        if prepared.plan.simulation.bytes_moved:
            parcels = self.below.parcels((*initial.tensors, *prepared.leaves))
        self.parcels = parcels
        self.interpreter: Interpreter | None = Interpreter(
            run.schedule, runner, parcels=parcels, moving=prepared.moving
        )
        self.chain, self.prepared, self.initial = chain, prepared, initial
        self.output: State | None = None
        self._held = True
        self._count(+1)

    def run(self) -> State:
        """The forward phase."""
        interpreter = self.interpreter
        assert interpreter is not None
        try:
            out = self._run_forward(interpreter)
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

    def differentiate(self, cotangents: Gradients) -> tuple[Gradients, dict[int, torch.Tensor]]:
        """The backward phase: cotangents of the initial state, gradients by id of leaf."""
        interpreter, self.interpreter = self.interpreter, None
        if interpreter is None:
            raise GradientError(
                "this chain was differentiated a second time, but its tape is gone after one backward "
                "(retain_graph=True is not supported); call the chain again"
            )
        try:
            given = self._run_backward(interpreter, cotangents)
        finally:
            interpreter.close()
            self.release()
        return given, {key: g.to(leaf.dtype) for key, (leaf, g) in interpreter.sums.items()}

    def _run_forward(self, interpreter: Interpreter) -> State:
        interpreter.begin(self.initial)
        interpreter.run_phase(PhaseKind.FORWARD)
        return interpreter.hand_over(len(interpreter.runner.stages))

    def _run_backward(self, interpreter: Interpreter, cotangents: Gradients) -> Gradients:
        interpreter.cotangents[len(interpreter.runner.stages)] = cotangents
        interpreter.run_phase(PhaseKind.BACKWARD)
        return interpreter.cotangents[0]

    def release(self) -> None:
        """Give the budget back and drop what is held."""
        if self._held:
            self._held = False
            self._count(-1)
        if self.interpreter is not None:
            self.interpreter.close()
            self.interpreter = None

    def _count(self, calls: int) -> None:
        for tier, nbytes in self.prepared.plan.simulation.peak_nbytes.items():
            self.chain._live[tier] += calls * nbytes

    def __del__(self) -> None:
        if getattr(self, "_held", False):  # False: made in part only
            self._count(-1)
            if self.parcels is not None:
                self.below.leave(self.parcels)


class _ChainNode(torch.autograd.Function):
    """The one autograd node of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, states: int, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.states = call, states
        ctx.leaves = [id(leaf) for leaf in inputs[states:]]
        with with_tangents(), reentrant_checkpointing_off():
            out = call.run()
        ctx.mark_non_differentiable(*(t for t, requires in zip(out.tensors, out.requires, strict=True) if not requires))
        return out.tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        check_differentiated_once("this chain", "call its stages one after the other without the chain")
        with reentrant_checkpointing_off():
            given, sums = ctx.call.differentiate(list(cotangents))
        return (None, None, *given, *(sums.get(key) for key in ctx.leaves))
