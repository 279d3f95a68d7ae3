"""`Chain`: stages one after the other as one differentiable function under a budget."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tapestream.capture.cells import kept_nbytes
from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError
from tapestream.executor.engines import EngineStatistics
from tapestream.frontends.around import check_around, uncompiled
from tapestream.frontends.below import Below, check_home, check_lanes, plan_with
from tapestream.frontends.chain_call import Call, ChainNode
from tapestream.frontends.check import check_deterministic
from tapestream.frontends.first_call import FirstCall
from tapestream.frontends.given import (
    check_kinds,
    check_knobs,
    check_not_inference,
    fit_given_plan,
    is_device,
    listed,
    named_device,
)
from tapestream.frontends.giving_way import Awaiting
from tapestream.frontends.others import beside_others, room_for_call
from tapestream.frontends.reached import also_reached
from tapestream.ir.actions import Tier
from tapestream.planning.cache import ByShape, KnownInputs, Prepared, ProfiledStages, key_of, shapes_of
from tapestream.planning.exceeded import Exceeded
from tapestream.planning.gradient_costs import with_gradients
from tapestream.planning.plan import Plan
from tapestream.planning.profile import profile_stages, undisturbed
from tapestream.runner.ambient import as_recompute
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.graph import let_go_of_failed_backward
from tapestream.runner.join import join, views_written, with_dense
from tapestream.runner.nesting import covered, covering
from tapestream.runner.stage import Mode, Stage, Traits, left_nbytes, mode_of
from tapestream.runner.state import State, take_apart


class Chain(nn.Module):
    """``stages`` applied one after the other, differentiated within ``budget`` bytes.

    ``stages``: modules or functions from a state to the next one. A state is a tensor or any pytree of tensors.
    ``budget``: bytes that a call may hold beyond arguments, parameters with their gradients, and the result
    (``"512MiB"``, int, Budget; None: what is free now, less 5%). ``gradients_within=True``: the gradients that backward
    makes, of parameters (as if they had none before) and argument, count too; until they are made, plans use their room
    for the tape. ``planner``: a name in `tapestream.planners` or ``"auto"``; ``knobs`` are its options. ``plan``: a
    Plan to use as it is. ``device``: where inputs must lie (None: where the first one lies). ``verify=True``: the first
    call runs each stage twice, and raises GradientError if the two differ. Of each plan the first call is measured; if
    it holds more than the budget, it warns (`BudgetExceeded`; with ``verify`` it raises BudgetError), and later calls
    are planned for that.

    ``folder``: a folder on disk. Plans may move restart checkpoints and saved tensors there while computation goes on.
    On a GPU they may move to host memory too, with or without a folder. This run's files lie in a subfolder of their
    own, which is deleted with the chain. ``home``: the slowest tier that may be used: ``"disk"``, ``"host"`` (GPU
    only), ``"device"`` (nothing moves) or ``"auto"``, the slowest there is. ``Budget(device=, host=, disk=)`` limits
    each. ``machine``: the speeds of the links (None: measured, in two seconds, when a plan depends on them).
    ``engine``: the name of a copy engine (``"adversarial"`` for tests). Parameters, arguments and what others hold
    never move.

    The first call with new shapes or modes makes a plan; later calls reuse it. If a stage writes into a view, and
    others use the tensor that the view shows, the stages from the one that made it run as one. Gradients equal plain
    PyTorch's bit for bit, of several calls before one backward, too. One exception: if a parameter is used twice inside
    the chain, and by plain code after or between its calls, its parts may be added in another order.

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
        self._knobs, self._given = knobs, plan
        self._known: ByShape[KnownInputs] = ByShape()
        self._last: Plan | None = None
        self._live = dict.fromkeys(Tier, 0)  # bytes of the budget that live calls hold
        self.awaiting = Awaiting()
        self.exceeded = Exceeded(type(self).__name__)
        self._first: FirstCall | None = None
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
        mine: dict[str, Any] = {"_known": ByShape(), "awaiting": Awaiting(), "_live": dict.fromkeys(Tier, 0)}
        return {**self.__dict__, **mine, "_last": None, "_below": None, "_first": None}

    @property
    def user_functions(self) -> tuple[Callable[[Any], Any], ...]:
        """Its stages."""
        return tuple(stage.function for stage in self._stages)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last call. None before the first call that needs gradients."""
        return self._last

    @property
    def copies(self) -> EngineStatistics:
        """Since this was made: bytes moved per (source, target), number of copies, seconds of waiting for them."""
        return EngineStatistics({}, 0, 0.0) if self._below is None else self._below.statistics()

    @uncompiled
    def forward(self, state: Any) -> Any:
        """The last state, differentiable like any other tensor."""
        initial, tensors = self._take_apart(state)
        device = self._check_device(initial)
        if not torch.is_grad_enabled() or covered():
            return self._plain(state)
        check_not_inference(type(self).__name__, tensors)
        check_around(type(self).__name__)
        with covering(), reentrant_checkpointing_off():
            prepared = self._prepare(initial, device)
        if not (any(initial.requires) or prepared.reaches_leaves or self._trainable()):
            return self._plain(state)
        call = self._call(prepared, initial, device)
        inputs = (*tensors, *prepared.leaves)
        out = ChainNode.apply(call, len(tensors), *inputs)  # type: ignore[no-untyped-call]
        template = call.output
        assert template is not None
        return template.tree(out)

    def _take_apart(self, state: Any) -> tuple[State, tuple[torch.Tensor, ...]]:
        return take_apart(state)

    def _call(self, prepared: Prepared, initial: State, device: torch.device) -> Call:
        return Call(self, prepared, initial, device)

    def first_call(self) -> FirstCall | None:
        """What measures a call, if it is the first one of its plan."""
        first, self._first = self._first, None
        return first

    def _trainable(self) -> bool:
        return any(p.requires_grad for stage in self._stages for p in stage.parameters())

    def _plain(self, state: Any) -> Any:
        with covering():
            for stage in self._stages:
                state = stage.function(state)
        return state

    def _prepare(self, initial: State, device: torch.device) -> Prepared:
        kind, shapes = key_of(initial, self._mode(), device), shapes_of(initial)
        known = self._known.find(kind, shapes)
        if known is None:
            known = KnownInputs(self._profiled(initial, device))
            self._known.add(kind, shapes, known)
        none = dict.fromkeys(Tier, 0)
        found = self.awaiting.planned(
            lambda: self._beside(known, self._live, initial, device), lambda: self._beside(known, none, initial, device)
        )
        self._last = found.plan
        return found

    def _beside(self, known: KnownInputs, live: Mapping[Tier, int], initial: State, device: torch.device) -> Prepared:
        """A plan beside calls that hold ``live`` bytes."""
        found = known.beside.find(tuple(live.values()), lambda: self._room(device, live))
        if found is None:
            if any(live.values()):
                let_go_of_failed_backward()
            plan = self._planned(known.profiled, live, initial, device)
            repeated = self._repeated(known.profiled.traits, initial)
            found = Prepared.of(plan, self._stages, known.profiled, device, repeated=repeated, fusing=self._fusing)
            known.beside.add(tuple(live.values()), found)
            limit = self._room(device, live).device_nbytes
            self._first = FirstCall.of(
                known, plan, limit, device, self.exceeded, strict=self.verify, within=self.gradients_within
            )
        return found

    def _profiled(self, initial: State, device: torch.device) -> ProfiledStages:
        if self.verify:
            with as_recompute():
                check_deterministic(self._stages, initial, device)
        profile, traits, last = self._profile(initial, device)
        beside = kept_nbytes(t.cells for t in traits) + left_nbytes(traits)
        profile = replace(profile, outside_nbytes=profile.outside_nbytes + beside)
        if self.gradients_within:
            profile = with_gradients(profile, traits, initial)
        return ProfiledStages.of(profile, traits, last)

    def _planned(
        self, profiled: ProfiledStages, live: Mapping[Tier, int], initial: State, device: torch.device
    ) -> Plan:
        below, profile = self._below_on(device), profiled.profile
        with beside_others(type(self).__name__, live[Tier.DEVICE], self.budget):
            room = self._room(device, live)
            if self._given is not None:
                plan = fit_given_plan(self._given, profile, room)
            else:
                plan = plan_with(below, profile, room, self.planner, self._knobs_for(profiled.traits, initial))
        check_lanes(plan, below)
        return plan

    def _knobs_for(self, traits: Sequence[Traits], initial: State) -> dict[str, Any]:
        return self._knobs

    def _repeated(self, traits: Sequence[Traits], initial: State) -> frozenset[int]:
        """Which tensors of the first state are used more than once."""
        return traits[0].inputs_repeated

    def _mode(self) -> Mode:
        return mode_of([module for stage in self._stages for module in stage.modules])

    def _profile(self, initial: State, device: torch.device) -> tuple[Profile, list[Traits], State]:
        """The stages' profile, after joining those that must be one."""
        return self._profile_part(slice(None), initial, device)

    def _profile_part(self, part: slice, initial: State, device: torch.device) -> tuple[Profile, list[Traits], State]:
        while True:
            stages = self._stages[part]
            profile, traits, last = profile_stages(stages, initial, device, gradients_within=self.gradients_within)
            if not any(trait.mutates for trait in traits[1:]):
                return profile, traits, last
            cells = [cell for trait in traits for cell in trait.cells]
            with as_recompute(), undisturbed(stages, device, cells=cells):
                written = views_written(stages, initial, device)
            if not written.stretches:
                return profile, with_dense(traits, written), last
            self._stages[part] = join(stages, written.stretches)
            self._known.clear()  # their traits are of the stages before

    def _room(self, device: torch.device, live: Mapping[Tier, int]) -> Budget:
        """What other live calls leave of the budget."""
        host = self._below_on(device).host_nbytes()
        return room_for_call(type(self).__name__, self.budget, live, host, device)

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
