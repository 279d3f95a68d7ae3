"""`Program`: any PyTorch function as one differentiable call under a budget, without marks in it."""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tapestream.costs import Budget, Machine
from tapestream.errors import InputError
from tapestream.executor.engines import EngineStatistics
from tapestream.executor.program.calls.patterns import Kinds
from tapestream.executor.program.calls.seams import listener_now
from tapestream.executor.program.noting.along import Along
from tapestream.executor.program.noting.collector import patient_collector
from tapestream.executor.program.noting.contexts import Contexts
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.keeper import Keeper
from tapestream.executor.program.record.last import Last
from tapestream.executor.program.record.record import Record
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Moves
from tapestream.frontends.around import uncompiled
from tapestream.frontends.below import Below, check_home
from tapestream.frontends.given import check_kinds, named_device
from tapestream.frontends.program.call import Replays, Sweep, held_by, sweep
from tapestream.frontends.program.courses import Courses, beside_beginning
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.explain import explained
from tapestream.frontends.program.explanation import Explanation
from tapestream.frontends.program.given import check_function, device_of, kind_of, remember
from tapestream.frontends.program.kept import tell_kept, tell_strayed
from tapestream.frontends.program.live import Live
from tapestream.frontends.program.modules import Opaque, places_in, taking_whole
from tapestream.frontends.program.orders import Reversal
from tapestream.frontends.program.plans import LOOKS, Prepared, after_sweep, again, prepare
from tapestream.frontends.program.report import Report
from tapestream.frontends.program.results import found_in
from tapestream.frontends.program.sizes import Sizes
from tapestream.frontends.program.unreached import for_losses
from tapestream.frontends.program.waiting import Waiting
from tapestream.frontends.program.watch import Online, Planned
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.planning.exceeded import Exceeded
from tapestream.planning.plan import Plan
from tapestream.runner.guards import places, refuse_hooks
from tapestream.runner.modes import unhooked


class Program:
    """``function`` differentiated within ``budget`` bytes, exactly. Branches, loops, exceptions, closures and
    containers are Python's own: only torch calls are traced and run again.

    ``budget``: bytes that backward may hold beyond arguments, parameters with gradients, and results (``"512MiB"``,
    int, Budget; None: what is free now, less 5%). ``gradients_within=True``: the gradients that backward makes, of
    parameters and arguments (as if they had none before), count too; until they are made, plans use their room for the
    tape. ``planner``: a name in `tapestream.planners` or ``"auto"``. ``device``: where the budget counts (None: that of
    the first tensor given). ``opaque``: modules, or classes of modules, or one of either, whose call is one operation:
    it is replayed as a whole, and may be compiled. ``"auto"``: the repeated blocks of the modules that ``function``
    calls. Compiled modules are always one operation. ``folder``, ``home``, ``machine``, ``engine``: where restart
    checkpoints and saved tensors may move, as in `Chain`: to host memory on a GPU, and to a folder if one is given.
    ``copies`` counts them. ``verify=True``: values made again are compared, bit for bit, with what the first run made,
    and what exceeds the budget is an error; slow.

    The first call keeps all that is saved while it fits, and restart checkpoints as it goes. Later calls with the same
    operations follow a plan for them. A call with other operations is never wrong, only less well placed. Gradients
    flow through the graph of the function's own run: hooks, second backwards and gradients of gradients are plain
    PyTorch's. If gradients are off, and inside another program, the function runs as it is.

    Raises BudgetError if no plan fits; InputError and GradientError, by name, for what replays could not reproduce.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        budget: Budget | str | int | None = None,
        gradients_within: bool = False,
        planner: str = "auto",
        device: torch.device | str | None = None,
        opaque: Opaque = (),
        folder: str | os.PathLike[str] | None = None,
        home: str = "auto",
        machine: Machine | None = None,
        engine: str = "auto",
        verify: bool = False,
    ) -> None:
        check_function(function)
        self.function, self.planner, self.verify = function, planner, verify
        self._whole = taking_whole(function, opaque)
        self.budget, self.gradients_within = Budget.of(budget), gradients_within
        self._device = named_device(device)
        check_kinds(engine, machine, gradients_within=gradients_within, verify=verify)
        if planner != "auto":
            planners[planner]  # refuses unknown names
        check_home(home, folder, host=True)
        self._tiers: dict[str, Any] = {"folder": folder, "home": home, "machine": machine, "engine": engine}
        self._below: Below | None = None
        self._kinds = Kinds()
        self.exceeded = Exceeded("Program")
        self._again = set[str]()  # Functions that run again in backward
        self._prepared: dict[Any, Prepared] = {}
        self._last: Prepared | None = None
        self._noted: dict[Any, Last | None] = {}
        self._courses = Courses()
        self._reaching = set[Any]()  # kinds of calls of which backward reaches more results than the losses
        self._replays: weakref.ref[Replays] | None = None
        self._live = Live(self.budget)
        self.report: Report | None = None

    @property
    def user_functions(self) -> tuple[Callable[..., Any], ...]:
        """Its function."""
        return (self.function,)

    @property
    def plan(self) -> Plan | None:
        """The plan for the last sequence of operations. None before the first call that needs gradients."""
        return None if self._last is None else self._last.plan

    @property
    def copies(self) -> EngineStatistics:
        """Since this was made: bytes moved per (source, target), number of copies, seconds of waiting for them."""
        return EngineStatistics({}, 0, 0.0) if self._below is None else self._below.statistics()

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, differentiable like any other tensors."""
        if not torch.is_grad_enabled() or listener_now() is not None:
            return self._whole(*args, **kwargs)
        with unhooked(places):
            return self._differentiable(args, kwargs)

    def _differentiable(self, args: Any, kwargs: Any) -> Any:
        refuse_hooks("Program")
        device = self._device_of((args, kwargs))
        self._kinds.trim()
        if self._below is not None:
            self._below.settle()
        key = kind_of((args, kwargs))
        room = self._live.room_for(key, self._prepared.get(key), device, self._below_on(device).host_nbytes())
        record, tape = Record(self._kinds, digests=[] if self.verify else None), Tape()
        keeper = Keeper(device, record.generators)
        online = Online(record, keeper, tape, room.device_nbytes or 0)
        prepared, known = self._prepared.get(key), None if self.verify else self._courses.of(key, room)
        watch: Online | Planned = online
        along = None if known is None else Along(known.course, functools.partial(self._otherwise, key, online))
        if along is None and prepared is not None and prepared.fits(room):
            watch = self._following(prepared, online, device)
        online.recorder = recorder = Recorder(record, keeper, tape, watch, along)
        recorder.contexts = Contexts(self._again, room.device_nbytes or float("inf"))
        recorder.spare = watch.spare
        if isinstance(watch, Planned) and prepared is not None:
            recorder.moves = watch.moves
            recorder.holding, recorder.packs.holding = prepared.holding
            if prepared.unreached is not None:
                recorder.packs.unreached = prepared.unreached.operations
            if not (self._measures(prepared) or self.verify):
                recorder.follow(self._noted.get(key), functools.partial(places_in, self.function))
        try:
            with patient_collector() if along is None else contextlib.nullcontext():
                found = sweep(functools.partial(self._whole, *args, **kwargs), record, keeper, recorder)
                if any(record.packs):
                    self._finish(found, tape, watch, room, key, recorder, prepared)
                if known is not None and along is not None:
                    self._went(along, known.report, key, recorder, room)
        except BaseException:
            if isinstance(watch, Planned):
                watch.give_up()
            raise
        finally:
            recorder.stop_following()
            online.recorder = None  # the tape is to go when the graph does, and not when cycles are collected
        return found.result

    def _following(self, prepared: Prepared, online: Online, device: torch.device) -> Planned:
        moves, online.keeper.unread = None, prepared.unread
        if prepared.moves:
            below, record, keeper = self._below_on(device), online.record, online.keeper
            moves = Moves(below.parcels(()), record, device, prepared.cuts, online.tape.saved, prepared.reads)
            cuts = prepared.cuts
            moves.kept = lambda stage: keeper.kept.get(cuts[stage])
            weakref.finalize(online.tape, below.leave, moves.parcels).atexit = False
        return Planned(prepared.turns, prepared.saved, prepared.operations, online, moves)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is read from a file, begins anew: without plans and without calls that wait for backward."""
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("budget", "gradients_within", "planner", "verify")
        }
        return vars(type(self)(self.function, device=self._device, **options, **self._tiers)) | {"_whole": self._whole}

    @unhooked(places)
    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What a call with these arguments would save for backward, from which lines of code, and what the plan does
        with it.

        Runs the function once, within the budget as a call does. Generators, buffers, gradients and plans are
        afterwards as before; other effects of the function's own Python remain. Raises InputError if nothing needs a
        gradient or no tensor is returned, BudgetError if no plan fits, and what the function itself raises.
        """
        if not torch.is_grad_enabled():
            raise InputError("explain: gradients are switched off here, so nothing is saved; leave torch.no_grad()")
        device = self._device_of((args, kwargs))
        function = functools.partial(self._whole, *args, **kwargs)
        known = self._prepared.get(kind_of((args, kwargs)))
        room = self._live.whole(device, self._below_on(device).host_nbytes())
        return explained(
            function, device, room, self.planner, self._kinds, known, self._below_on(device),
            gradients_within=self.gradients_within,
        )  # fmt: skip

    def _otherwise(self, key: Any, online: Online, held_nbytes: int) -> None:
        """What comes is another call than last time: the next one is to be noted from its beginning on."""
        self._courses.forget(key)
        online.depart(held_nbytes)

    def _went(self, along: Along, report: Report, key: Any, recorder: Recorder, room: Budget) -> None:
        """A call has gone along: all of it, or up to where it was noted."""
        nbytes = report.held_nbytes
        if along.strayed and not any(recorder.record.packs):  # nothing follows that could make room
            self._courses.forget(key)
            nbytes = along.held_nbytes
            tell_strayed(nbytes, room.device_nbytes, self.exceeded)
        if recorder.departed is None:
            self.report, self._last = report, self._prepared.get(key, self._last)
        else:
            record, nbytes = recorder.record, along.held_nbytes
            after = self.report if any(record.packs) else None
            after = after or replace(report, held_nbytes=0, planned=False)
            operations = along.operations + len(record)
            self.report = replace(after, operations=operations, held_nbytes=after.held_nbytes + nbytes)
        Waiting(self._live, {Tier.DEVICE: nbytes}, along.mark)

    def _finish(
        self, found: Sweep, tape: Tape, watch: Online | Planned, room: Budget, key: Any, recorder: Recorder,
        before: Prepared | None,
    ) -> None:  # fmt: skip
        """Make the call ready for its backward, and the plan for the next one; ``before``: that for this one."""
        record, kept, shape = found.record, found.keeper.kept, found.record.shape()
        whole = recorder.departed is None
        planned = isinstance(watch, Planned) and before is not None and _as_planned(found, watch, before, shape)
        moves = watch.moves if isinstance(watch, Planned) and planned else None
        below, waiting = self._below_on(found.keeper.device), dict.fromkeys(Tier, 0)
        borders = functools.cache(functools.partial(self._borders, found))
        unreached = before.unreached if planned and before is not None else None
        if planned and before is not None:
            record.unreached = frozenset() if unreached is None else unreached.operations
            assert before.reversal is not None
            assert before.plan is not None
            cuts, reversal, slots = before.cuts, before.reversal, before.slots
            if moves is not None:
                waiting.update(before.plan.simulation.peak_nbytes)
            if self._measures(before):
                self._remember(key, prepare(borders(), shape, room, "auto", before, below, unreached))
        else:
            if isinstance(watch, Planned):
                watch.give_up()
            budget = (watch.otherwise if isinstance(watch, Planned) else watch).budget

            def within(freed: int) -> tuple[list[int], Reversal, int]:
                with beside_beginning(recorder.departed):
                    return after_sweep(found, borders(), watch.taped, tape, budget + freed, self.planner)

            held = self._live.nbytes[Tier.DEVICE]
            plan = functools.partial(self._live.planned, key, within)
            if whole and key not in self._reaching:
                (cuts, reversal, slots), unreached = for_losses(plan, found, tape, borders.cache_clear)
            else:
                cuts, reversal, slots = plan()
            if self._live.nbytes[Tier.DEVICE] < held:  # others have given way
                room = self._live.room(found.keeper.device, below.host_nbytes())
            if not whole:
                pass  # the end of a program: all of it is noted the next time
            elif before is None or before.shape == shape or not before.fits(room):
                self._remember(key, prepare(borders(), shape, room, self.planner, None, below, unreached))
            else:  # a sequence of its own every time, perhaps: a plan when it comes again
                self._remember(key, Prepared.unplanned(shape))
        followed = recorder.followed() if planned else None
        lessons = None if followed is None else followed.lessons
        replays = Replays(found, cuts, reversal, functools.partial(again, slots), tape, moves, lessons)
        nbytes = waiting[Tier.DEVICE] = held_by(found.keeper.kept.values(), found.record, tape)
        recorded, reruns = len(reversal.recorded), reversal.reruns
        self.report = Report(len(record), len(cuts) - 1, recorded, len(kept), nbytes, planned, reruns)
        held = before.plan.peak_nbytes if planned and before is not None and before.plan is not None else nbytes
        tell_kept(recorder.contexts, held, room.device_nbytes, self.exceeded, strict=self.verify)
        replays.waiting = Waiting(self._live, waiting, tape, moves)
        tape.bring, tape.begins = replays.bring, replays.begins
        self._replays = weakref.ref(replays)
        if whole:
            self._note(key, recorder, shape, lambda: borders().sizes)
        if unreached is not None:
            unreached.watch(found, functools.partial(self._reaches_all, key))

    def _reaches_all(self, key: Any) -> None:
        """A backward has come to what the plan left out: calls of this kind are to be planned for all results."""
        self._reaching.add(key)
        self._prepared.pop(key, None)

    def _borders(self, found: Sweep) -> Borders:
        return Borders(found.record, found.numbers, gradients_within=self.gradients_within)

    def _measures(self, prepared: Prepared) -> bool:
        """Whether calls are still timed, for a better plan."""
        return prepared.looks < LOOKS and self.planner == "auto"

    def _note(self, key: Any, recorder: Recorder, shape: Any, sizes: Callable[[], Sizes]) -> None:
        """What the next call, if it makes the same operations by the same plan, need not look at again."""
        assert self.report is not None
        prepared = self._prepared.get(key)
        if prepared is None:  # calls in other threads have come in between
            return
        follows = self.report.planned and not self._measures(prepared)
        remember(self._noted, key, recorder.as_last() if follows else None)
        self._courses.learn(key, recorder, prepared, shape, self.report, sizes)

    def _remember(self, key: Any, prepared: Prepared) -> None:
        self._last = prepared
        remember(self._prepared, key, prepared)

    def _device_of(self, given: Any) -> torch.device:
        """As tensors on it say: with the number of a GPU."""
        return device_of(given) if self._device is None else torch.empty(0, device=self._device).device

    def _below_on(self, device: torch.device) -> Below:
        if self._below is None or self._below.device != device:
            self._below = Below(device, budget=self.budget, **self._tiers)
        return self._below


def _as_planned(found: Sweep, watch: Planned, prepared: Prepared, shape: Any) -> bool:
    """Whether the first sweep has done all that its plan said."""
    kept = {0, *(k for k, turn in prepared.turns.items() if turn.keep is not None)}
    as_planned = watch.followed and prepared.shape == shape and found.keeper.kept.keys() == kept
    as_planned = as_planned and prepared.unread == found.record.unread.storages
    return as_planned and watch.ended(prepared.turns[prepared.operations], found_in(found.result))


__all__ = ["Program", "Report"]
