"""The schedule of a loop: how many steps make a stage, how many restart checkpoints are kept, and which planner."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tapestream.costs import Budget, Profile, UniformStages
from tapestream.errors import Allowance, BudgetError, InputError
from tapestream.frontends.given import fit_given_plan
from tapestream.frontends.loop.costs import StepCost
from tapestream.planners import planners
from tapestream.planners._recurrences import least_forwards
from tapestream.planners.online import Online
from tapestream.planning.allowances import allowances
from tapestream.planning.plan import Alternative, Plan
from tapestream.units import format_nbytes

MOST_SLOTS = 200
"""More restart checkpoints than this make trees that take seconds to judge, and save little: stages grow instead."""
_FEW = 4  # stages, of which all kinds of moments of a long chain with one restart checkpoint are there


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan for stages of ``chunk`` steps."""

    plan: Plan
    chunk: int


def profile_of(cost: StepCost, steps: int, chunk: int, outside_nbytes: int = 0) -> Profile:
    """``steps`` equal steps in stages of ``chunk``."""
    chunk = min(chunk, steps)
    stages = UniformStages(cost.of(chunk), -(-steps // chunk))
    return Profile(stages, cost.output_nbytes, outside_nbytes=outside_nbytes)


def choose(
    cost: StepCost,
    steps: int,
    budget: Budget,
    planner: str,
    chunk: int | None,
    knobs: dict[str, object],
    outside_nbytes: int = 0,
    *,
    unit: int = 1,
    most: int | None = None,
) -> Chosen:
    """The plan of ``planner``, or for "auto" the fastest of binomial checkpointing on stages of 1, 2, 3, .. units.

    A longer stage takes more bytes for its record, leaves fewer slots, and makes the chain shorter; one stage of
    all steps is plain PyTorch, and so are stages of ``most`` steps, the longest that may be, where all of them can be
    stored. Closed forms choose, the judge confirms. Raises BudgetError when nothing fits.
    """
    most = most or steps
    chunk = chunk and min(chunk, most)
    if planner != "auto":
        profile = profile_of(cost, steps, chunk or unit, outside_nbytes)
        if planner in ("revolve", "binomial") and not knobs:
            knobs = {"slots": slots_within(profile, budget)}
        schedule = planners[planner](profile, budget, None, **knobs)
        return Chosen(Plan.judged(schedule, profile, budget, None), chunk or unit)
    if knobs:
        raise InputError(f"planner='auto' has no knobs, found {', '.join(knobs)}; name the planner that they belong to")
    if chunk is None and most < steps:
        with contextlib.suppress(BudgetError):
            profile = profile_of(cost, steps, most, outside_nbytes)
            return Chosen(Plan.judged(planners["store_all"](profile, budget, None), profile, budget, None), most)
    found = []
    for length in [chunk] if chunk else lengths(min(steps, most), unit):
        profile = profile_of(cost, steps, length, outside_nbytes)
        slots = slots_within(profile, budget)
        if slots * cost.output_nbytes + base_nbytes(profile) > (budget.device_nbytes or 1 << 62):
            continue
        stage = profile.stages[0]
        found.append((least_forwards(len(profile), slots) * stage.forward_seconds, length))
    length = min(found)[1] if found else chunk or unit
    try:
        plan = _fitting(profile_of(cost, steps, length, outside_nbytes), budget)
    except BudgetError as error:
        again = partial(choose, cost, steps, chunk=chunk, outside_nbytes=outside_nbytes, unit=unit, most=most)
        error.offers = partial(_offers, again, profile_of(cost, steps, length, outside_nbytes), error.least_nbytes or 0)
        raise
    return Chosen(replace(plan, alternatives=_alternatives(plan, length, sorted(found))), length)


class _ByClosedForm(NamedTuple):
    """What a plan says of itself."""

    peak_nbytes: int
    seconds: float
    overhead: float
    fills: Mapping[str, int] = {}


def _offers(again: Callable[..., Chosen], leanest: Profile, least_nbytes: int) -> tuple[Allowance, ...]:
    """Budgets at which such a call works; ``again``: chooses for the same steps. The least, a single restart checkpoint
    for the stages of ``leanest``, is not judged: that takes minutes for a million of them."""

    def within(nbytes: int | None) -> Plan | _ByClosedForm:
        if nbytes != least_nbytes:
            return again(budget=Budget(nbytes), planner="auto", knobs={}).plan
        n, cost = len(leanest), leanest.stages[0]
        stored = n * (cost.recorded_seconds + cost.backward_seconds)
        seconds = stored + least_forwards(n, 1) * cost.forward_seconds
        return _ByClosedForm(nbytes, seconds, seconds / stored if stored else 1.0, _filled(leanest, nbytes))

    return allowances(within, least_nbytes)


def _filled(leanest: Profile, nbytes: int) -> Mapping[str, int]:
    """What ``nbytes`` are filled by, of stages of ``leanest`` with a single restart checkpoint: the same for few of
    them. Empty where few need other bytes."""
    few = min(len(leanest), _FEW)
    profile = replace(leanest, stages=leanest.stages[:few])
    schedule = planners["revolve" if few > 1 else "store_all"](profile, None, None, **({"slots": 1} if few > 1 else {}))
    plan = Plan.judged(schedule, profile, Budget(None), None)
    return plan.fills if plan.peak_nbytes == nbytes else {}


def _alternatives(plan: Plan, length: int, found: list[tuple[float, int]]) -> tuple[Alternative, ...]:
    """The plan and the two next best stage lengths, by the seconds of their forward sweeps: all else is the same."""
    shown = [(plan.planner, plan.seconds, f"in stages of {length} steps")]
    for seconds, other in found[1:3]:
        shown.append((f"stages of {other} steps", plan.seconds + seconds - found[0][0], "by its closed form"))
    return tuple(shown)


def _fitting(profile: Profile, budget: Budget) -> Plan:
    """Binomial checkpointing with as many slots as the judge lets pass."""
    n, slots = len(profile), slots_within(profile, budget)
    while True:
        if n > 1 and slots >= n - 1:  # nothing is run more than twice
            schedule = planners["periodic"](profile, None, None, segments=n)
        elif n == 1:
            schedule = planners["store_all"](profile, None, None)
        else:
            schedule = planners["revolve"](profile, None, None, slots=slots)
        try:
            return Plan.judged(schedule, profile, budget, None)
        except BudgetError as error:
            if slots == 1 or n == 1:
                raise too_small(error, budget) from None
            slots = max(1, min(slots, n - 1) - max(1, slots // 50))


def too_small(error: BudgetError, budget: Budget) -> BudgetError:
    """The judge's refusal in the words of a loop."""
    least = error.least_nbytes or 0
    limit = budget.device_nbytes or 0
    return BudgetError(
        f"Loop: a budget of {format_nbytes(limit)} ({limit} bytes) was asked for, but {format_nbytes(least)} ({least} "
        "bytes) are needed even with a single restart checkpoint; allow that much, or make the state smaller (a "
        "smaller batch)",
        least_nbytes=least,
    )


def lengths(steps: int, unit: int = 1) -> Iterator[int]:
    """Stage lengths worth trying: all up to 4 units, then a quarter more each time, and all steps at once."""
    length, all_units = 1, -(-steps // unit)
    while length < all_units:
        yield length * unit
        length += max(1, length // 4)
    yield all_units * unit


def base_nbytes(profile: Profile) -> int:
    """Bytes of the device beside restart checkpoints: the states around what runs, a record, two cotangents."""
    cost = profile.stages[0]
    recorded = cost.saved_nbytes + max(cost.recorded_extra_nbytes, cost.backward_extra_nbytes)
    running = max(cost.forward_extra_nbytes, recorded)
    return profile.outside_nbytes + 2 * cost.output_nbytes + 2 * cost.cotangent_bytes + running


def slots_within(profile: Profile, budget: Budget) -> int:
    """About as many restart checkpoints as the budget holds; no more than can be judged at once, or one a stage."""
    n, size = len(profile), profile.stages[0].output_nbytes
    limit = budget.device_nbytes
    room = n if limit is None or not size else max(1, (limit - base_nbytes(profile)) // size)
    return n if room >= n - 1 else min(n, room, MOST_SLOTS)


def given_plan(plan: Plan, cost: StepCost, steps: int, budget: Budget) -> Chosen:
    """A plan that the user brings: its number of stages says how long they are.

    Raises InputError where it belongs to another length, BudgetError where it does not fit the budget here.
    """
    chunk = -(-steps // plan.schedule.stages)
    profile = profile_of(cost, steps, chunk)
    return Chosen(fit_given_plan(plan, profile, budget), chunk)


def online_of(
    cost: StepCost, budget: Budget, planner: str, chunk: int | None, knobs: dict[str, object]
) -> tuple[Online, int, int]:
    """For a run of unknown length: who chooses restart checkpoints, steps to a stage, bytes that both take."""
    if planner not in ("auto", "online"):
        raise InputError(f"Loop: planner {planner!r} needs the number of steps, which until= leaves open; use 'online'")
    limit = budget.device_nbytes
    length = chunk or (1 if planner == "online" else few_steps(cost, limit))
    profile = profile_of(cost, 1 << 40, length)
    slots = knobs.get("slots") or max(1, min(MOST_SLOTS, slots_within(profile, budget)))
    unknown = knobs.keys() - {"slots", "rule"}
    if unknown:
        raise InputError(f"planner 'online' has no knob {sorted(unknown)[0]!r}; its knobs are slots, rule")
    rule: Any = knobs.get("rule", "wang_moin")
    online = Online(slots, rule)  # type: ignore[arg-type]
    nbytes = base_nbytes(profile) + online.slots * cost.output_nbytes
    if limit is not None and nbytes > limit:
        raise too_small(BudgetError("", least_nbytes=base_nbytes(profile) + cost.output_nbytes), budget)
    return online, length, nbytes


def few_steps(cost: StepCost, limit: int | None) -> int:
    """Deciding takes about ten microseconds a stage: enough steps to hide it, in a quarter of the budget at most."""
    each = max(1, cost.saved_nbytes + cost.output_nbytes)
    return max(1, min(32, (limit or 1 << 40) // 4 // each))
