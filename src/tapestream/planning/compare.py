"""`compare` and `trade_off`: every planner on the same training step, side by side."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.planners import planners
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan

POINTS = 6
"""Budgets on a curve of `trade_off`."""


class Judged(Protocol):
    """A plan, or several that belong to one step."""

    @property
    def seconds(self) -> float:
        """Of the step."""


T = TypeVar("T", bound=Judged)
Told = Callable[[str, int, int], None]
"""Told what is being planned, how much is done, and of how much."""


def _nobody(_what: str, _done: int, _of: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one planner makes of a step: a plan, or the ``reason`` why there is none.

    ``least_nbytes``: where the budget is too small, the least device budget found to work, None where it is not known.
    """

    planner: str
    plan: T | None
    planning_seconds: float
    applies: bool = True
    reason: str = ""
    least_nbytes: int | None = None

    @property
    def seconds(self) -> float:
        """Of the step; infinite without a plan."""
        return inf if self.plan is None else self.plan.seconds


def compare(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    told: Told = _nobody,
    **terms: Any,
) -> list[Outcome[Plan]]:
    """What each planner makes of ``profile`` within ``budget``, the fastest first, then those that need more, then
    those that do not apply.

    ``terms``: as `make_plan` takes them (update, home, resident, accumulate). Planners that move states need links
    in ``machine``. Raises nothing where none fits: every outcome then says why.
    """
    return outcomes(planners, lambda name: make_plan(profile, budget, machine, planner=name, **terms), told)


def trade_off(
    profile: Profile, machine: Machine | None = None, *, points: int = POINTS, told: Told = _nobody, **terms: Any
) -> dict[str, list[Plan]]:
    """Plans by each planner that applies for ``points`` device budgets, from the least that any can do with to what the
    tape takes with everything stored.

    No limits in other tiers; ``terms`` as for `compare`.
    """

    def planned(name: str, nbytes: int) -> Plan:
        return make_plan(profile, nbytes, machine, planner=name, **terms)

    least = [found.least_nbytes for found in compare(profile, 1, machine, **terms)]
    low = min((nbytes for nbytes in least if nbytes is not None), default=1)
    stored = make_plan(profile, None, machine, planner="join" if profile.ends else "store_all", **terms)
    budgets = spaced(low, stored.peak_nbytes, points)
    return curves(planners, budgets, planned, told, enough_seconds=stored.stored_seconds)


def outcomes(names: Iterable[str], planned: Callable[[str], T], told: Told = _nobody) -> list[Outcome[T]]:
    """`compare` for whatever ``planned`` makes of a planner's name."""
    names = list(names)
    found = []
    for number, name in enumerate(names):
        found.append(_outcome(name, planned))
        told("planners", number + 1, len(names))
    return sorted(found, key=lambda one: (one.seconds, not one.applies, one.least_nbytes or inf))


def curves(
    names: Iterable[str],
    budgets: Sequence[int],
    planned: Callable[[str, int], T],
    told: Told = _nobody,
    *,
    enough_seconds: float = 0.0,
) -> dict[str, list[T]]:
    """`trade_off` for whatever ``planned`` makes of a planner's name and a device budget, ``budgets`` in rising order.

    A curve ends at ``enough_seconds``; planners without a plan at any budget are left out.
    """
    names = list(names)
    found: dict[str, list[T]] = {}
    for number, name in enumerate(names):
        for done, nbytes in enumerate(budgets):
            told("trade-off", number * len(budgets) + done, len(names) * len(budgets))
            try:
                plan = planned(name, nbytes)
            except BudgetError:
                continue
            except InputError:
                break
            found.setdefault(name, []).append(plan)
            if plan.seconds <= enough_seconds:
                break
    told("trade-off", len(names) * len(budgets), len(names) * len(budgets))
    return found


def spaced(low: int, high: int, points: int) -> list[int]:
    """``points`` budgets from ``low`` to ``high``, each larger than the one before by the same factor."""
    low, high = max(1, low), max(1, low, high)
    return sorted({round(low * (high / low) ** (k / max(1, points - 1))) for k in range(points)})


def _outcome(name: str, planned: Callable[[str], T]) -> Outcome[T]:
    began = perf_counter()
    try:
        plan = planned(name)
    except BudgetError as error:
        return Outcome(name, None, perf_counter() - began, True, str(error), error.least_nbytes)
    except InputError as error:
        return Outcome(name, None, perf_counter() - began, False, str(error))
    return Outcome(name, plan, perf_counter() - began)
