"""`Program`: any PyTorch function as one differentiable call under a budget, without marks in it."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.executor.program.keeper import Keeper, held_nbytes
from tapestream.executor.program.patterns import Kinds
from tapestream.executor.program.record import Record
from tapestream.executor.program.recorder import Recorder
from tapestream.frontends.available import free_nbytes
from tapestream.frontends.program.call import Call, ProgramNode, Sweep, sweep
from tapestream.frontends.program.cuts import Borders, binomial_slots
from tapestream.frontends.program.orders import Reversal, of_gaps, of_plan
from tapestream.frontends.program.results import replaced
from tapestream.frontends.program.watch import Online, Planned
from tapestream.ir import Schedule
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes

_CLOSED = ("auto", "revolve")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan for the program whose record has this ``shape``. ``saved``: bytes saved before each kept operation."""

    shape: Any
    plan: Plan
    cuts: list[int]
    reversal: Reversal
    saved: dict[int, int]
    operations: int


@dataclass(frozen=True, slots=True)
class Report:
    """The last call: its operations, stretches, restart checkpoints kept in the first sweep and their bytes; whether a
    plan for this very sequence was followed; the stretches that backward runs again."""

    operations: int
    stages: int
    kept: int
    kept_nbytes: int
    planned: bool
    reruns: int


class Program:
    """``function`` differentiated within ``budget`` bytes, exactly: branches, loops, exceptions, closures and
    containers are Python's own, since only torch calls are recorded and run again.

    ``budget``: bytes that backward may hold beyond arguments, parameters with gradients, and results (``"512MiB"``,
    int, Budget; None: what is free now less 5%). ``planner``: a name in `tapestream.planners` or ``"auto"``.
    ``device``: of the generators to watch (None: that of the first tensor given).

    The first call keeps restart checkpoints as it goes; later calls that make the same operations follow a plan for
    them. A call that turns out otherwise is never wrong, only less well placed. Without gradients asked for, the
    function runs as it is.

    Raises BudgetError when no plan fits, InputError and GradientError for what replays could not reproduce, by name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        budget: Budget | str | int | None = None,
        planner: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        if not callable(function):
            raise InputError(f"Program: a function or module is needed, found {type(function).__name__}")
        self.function, self.planner = function, planner
        self.budget = Budget.of(budget)
        self._device = None if device is None else torch.device(device)
        self._kinds = Kinds()
        self._prepared: _Prepared | None = None
        self._live = 0
        self.report: Report | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan for the last sequence of operations, None before the first call that needs gradients."""
        return None if self._prepared is None else self._prepared.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, differentiable like any other tensors."""
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        device = self._device or _device_of((args, kwargs))
        budget = self._room(device)
        record, keeper = Record(self._kinds), Keeper(device)
        online = Online(record, keeper, budget)
        prepared = self._prepared
        watch: Online | Planned = online
        if prepared is not None:
            watch = Planned(prepared.saved.keys(), prepared.saved, prepared.operations, online)
        online.recorder = recorder = Recorder(record, keeper, watch)
        found = sweep(functools.partial(self.function, *args, **kwargs), record, keeper, recorder)
        del recorder, online, watch
        if not found.tensors:
            return found.result
        call = self._call(found, budget)
        return _attached(call, found)

    def _call(self, found: Sweep, budget: int) -> Call:
        record, kept = found.record, found.keeper.kept
        prepared, shape = self._prepared, record.shape()
        planned = prepared is not None and prepared.shape == shape and kept.keys() == prepared.saved.keys() | {0}
        if planned:
            assert prepared is not None
            cuts, reversal = prepared.cuts, prepared.reversal
            if 0 not in reversal.kept:
                del kept[0]
        else:
            borders = Borders(record, found.tensors)
            for operation in [k for k in kept if not borders.allowed[k]]:
                del kept[operation]
            cuts, reversal = self._reversal_of_gaps(found, borders, budget)
            self._prepared = self._prepare(borders, shape, budget) or self._prepared
        nbytes = sum(held_nbytes(kept.values(), record).values())
        self.report = Report(len(record), len(cuts) - 1, len(kept), nbytes, planned, reversal.forwards)
        self._live += nbytes
        return Call(found, cuts, reversal, functools.partial(self._give_back, nbytes))

    def _reversal_of_gaps(self, found: Sweep, borders: Borders, budget: int) -> tuple[list[int], Reversal]:
        """Backward from the restart checkpoints that the first sweep has kept; fewer of them, where nothing fits."""
        record, kept, fine = found.record, found.keeper.kept, False
        while True:
            cuts = borders.cuts(1 if fine else budget, kept)
            starts = [cuts.index(operation) for operation in sorted(kept)]
            held = [
                sum(held_nbytes([kept[o] for o in sorted(kept)[: i + 1]], record).values()) for i in range(len(kept))
            ]
            try:
                return cuts, of_gaps(borders.profile(cuts), starts, held, budget, self._schedule)
            except BudgetError as error:
                if len(kept) == 1 and fine:
                    raise _too_small(error, budget) from None
                fine = len(kept) == 1
                for operation in sorted(kept)[1::2]:
                    del kept[operation]

    def _prepare(self, borders: Borders, shape: Any, budget: int) -> _Prepared | None:
        """The plan for the next call that makes the same operations."""
        plan = None
        finer = "revolve" if self.planner in _CLOSED else self.planner  # the time that "auto" takes grows fast
        for limit, planner in ((None, self.planner), (budget, finer), (1, finer)):
            cuts = borders.cuts(limit)
            profile = borders.profile(cuts)
            with contextlib.suppress(BudgetError):
                knobs: dict[str, Any] = {"slots": binomial_slots(profile, budget)} if planner == "revolve" else {}
                plan = make_plan(profile, Budget(budget), Machine(), planner=planner, **knobs)
                break
        if plan is None:
            return None
        reversal = of_plan(plan.schedule)
        saved, total = dict[int, int](), 0
        where = {cuts[stage] for stage in reversal.kept} - {0}
        for k in range(len(borders.record)):
            if k in where:
                saved[k] = total
            total += borders.record.saved[k]
        return _Prepared(shape, plan, cuts, reversal, saved, len(borders.record))

    def _schedule(self, profile: Profile, budget: Budget) -> Schedule:
        if self.planner not in _CLOSED:
            return planners[self.planner](profile, budget, None)
        # A gap's plan serves once: a closed form, which takes milliseconds where the best plan takes seconds.
        return planners["revolve"](profile, None, None, slots=binomial_slots(profile, budget.device_nbytes or 0))

    def _room(self, device: torch.device) -> int:
        limit = self.budget.device_nbytes
        room = (free_nbytes(device) if limit is None else limit) - self._live
        if room <= 0:
            raise BudgetError(
                f"Program: the budget of {limit} bytes is taken by calls whose backward has not run yet; run their "
                "backward first, drop their results, or allow more"
            )
        return room

    def _give_back(self, nbytes: int) -> None:
        self._live -= nbytes


def _too_small(error: BudgetError, budget: int) -> BudgetError:
    least = error.least_nbytes or 0
    return BudgetError(
        f"Program: a budget of {format_nbytes(budget)} ({budget} bytes) was asked for, but the least found to work is "
        f"{format_nbytes(least)} ({least} bytes), with the stretches as short as they may be; allow that much, or make "
        "the tensors smaller (less batch)",
        least_nbytes=least,
    )


def _attached(call: Call, found: Sweep) -> Any:
    """The result, its tensors attached to the call's node in place of the first sweep's graph."""
    before = list(found.tensors.values())
    after: Any = ProgramNode.apply(call, before, *call.inputs())  # type: ignore[no-untyped-call]
    by_id = dict(zip(map(id, before), after, strict=True))
    return replaced(found.result, lambda tensor: by_id.get(id(tensor), tensor))


def _device_of(given: Any) -> torch.device:
    tensors = (t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor))
    return next((t.device for t in tensors), torch.device("cpu"))


__all__ = ["Program", "Report"]
