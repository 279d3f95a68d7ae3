"""Schedules that keep restart checkpoints in a slower tier."""

import os
from dataclasses import replace
from pathlib import Path

from tapestream.costs import Budget, Machine, Profile, UniformStages
from tapestream.errors import BudgetError, StorageError
from tapestream.frontends.loop.costs import StepCost
from tapestream.frontends.loop.plans import MOST_SLOTS, Chosen, choose, few_steps, profile_of
from tapestream.ir import Tier
from tapestream.planners import planners
from tapestream.planners._tiers import Two
from tapestream.planners.async_multistage import intervals
from tapestream.planning.plan import Plan
from tapestream.simulate import Simulation, simulate
from tapestream.system.files import free_nbytes
from tapestream.units import format_nbytes

_LONGEST = 4_000
"""Stages of a schedule with copies that are judged one by one."""
_NAME = "async_multistage"


def choose_below(
    cost: StepCost, steps: int, machine: Machine, budget: Budget, planner: str, chunk: int | None,
    knobs: dict[str, object], *, unit: int = 1, most: int | None = None,
) -> Chosen:  # fmt: skip
    """As `choose`, with tiers below the device: "auto" takes the faster of recomputing from restart checkpoints here
    and of copying some of them away while computing (Kukreja, Hueckelheim, Gorman 2018)."""
    if planner not in ("auto", _NAME):
        return choose(cost, steps, budget, planner, chunk, knobs, unit=unit, most=most)
    chunk = chunk and min(chunk, most or chunk)
    length = chunk or unit * (1 if planner == _NAME else max(1, few_steps(cost, budget.device_nbytes) // unit))
    refused: BudgetError | None = None
    try:
        away = Chosen(_away(profile_of(cost, steps, length), budget, machine, knobs), length)
        if planner == _NAME:
            return away
    except BudgetError as error:
        if planner == _NAME:
            raise
        refused = error
    try:
        here = choose(cost, steps, budget, "auto", chunk, {}, unit=unit, most=most)
    except BudgetError:
        if refused is not None:
            raise
        return away
    return here if refused is not None or here.plan.seconds <= away.plan.seconds else away


def check_room(folder: str | os.PathLike[str] | None, simulation: Simulation) -> None:
    """Raise StorageError where ``folder`` has no room for what the plan puts there: before the first step, not in the
    midst."""
    nbytes = simulation.peak_nbytes.get(Tier.DISK, 0)
    if folder is None or not nbytes:
        return
    path = Path(folder).resolve()
    system = next(parent for parent in (path, *path.parents) if os.path.ismount(parent))
    free = free_nbytes(system)
    if nbytes > free:
        raise StorageError(
            f"Loop: restart checkpoints will take {format_nbytes(nbytes)} ({nbytes} bytes) in {path}, but on its file "
            f"system, mounted at {system}, {free} bytes are free, {nbytes - free} too few; make room (`tapestream "
            "clean` finds what killed runs have left), or choose another folder"
        )


def _away(profile: Profile, budget: Budget, machine: Machine, knobs: dict[str, object]) -> Plan:
    """The plan with copies; a long one is judged by two shorter ones of the same intervals.

    All intervals but the first and the last are alike, so counts, bytes and seconds grow by the same for each of them.
    Raises BudgetError where a tier is too small.
    """
    n = len(profile)
    if n <= _LONGEST:
        return Plan.judged(planners[_NAME](profile, budget, machine, **knobs), profile, budget, machine)
    slots, tier, interval = (knobs.get(name) for name in ("slots", "tier", "interval"))
    two = Two.of(_NAME, profile, budget, machine, slots, tier, spare=1)  # type: ignore[arg-type]
    best = next(intervals(n, two.slots, profile.stages[0], two.direct()))
    every = int(interval or min(n // 8, best))  # type: ignore[call-overload]
    knobs = {**knobs, "slots": min(two.slots, MOST_SLOTS), "interval": every}
    schedule = planners[_NAME](profile, budget, machine, **knobs)
    short = [(n % every or every) + every * count for count in (3, 4)]
    found = []
    for stages in short:
        part = replace(profile, stages=UniformStages(profile.stages[0], stages))
        found.append(simulate(planners[_NAME](part, budget, machine, **knobs), part, machine))
    simulation = _extended(found[0], found[1], (n - short[0]) // every)
    for where, nbytes in simulation.peak_nbytes.items():
        allowed = budget.nbytes(where)
        if allowed is not None and nbytes > allowed:
            raise BudgetError(
                f"Loop: a {where.name} budget of {allowed} bytes was asked for, but {nbytes} bytes are needed there",
                least_nbytes=nbytes if where is Tier.DEVICE else None,
            )
    return Plan(schedule, profile, simulation, budget, machine, schedule.planner)


def _extended(one: Simulation, other: Simulation, times: int) -> Simulation:
    """What ``times`` intervals more than ``one`` has take, where ``other`` has one more."""

    def grown(a: float, b: float) -> float:
        return a + (b - a) * times

    return replace(
        other,
        peak_nbytes={tier: int(grown(one.peak_nbytes[tier], n)) for tier, n in other.peak_nbytes.items()},
        makespan_seconds=grown(one.makespan_seconds, other.makespan_seconds),
        compute_seconds=grown(one.compute_seconds, other.compute_seconds),
        stall_seconds=grown(one.stall_seconds, other.stall_seconds),
        forwards=int(grown(one.forwards, other.forwards)),
        recorded=int(grown(one.recorded, other.recorded)),
        backwards=int(grown(one.backwards, other.backwards)),
        phase_seconds={kind: grown(one.phase_seconds[kind], s) for kind, s in other.phase_seconds.items()},
        bytes_moved={lane: int(grown(one.bytes_moved.get(lane, 0), n)) for lane, n in other.bytes_moved.items()},
    )
