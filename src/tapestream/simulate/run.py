"""`simulate`: the one entry to the judge."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import MEMORIES, Action, Backward, Forward, PhaseKind, Record, Schedule, Tier
from tapestream.ir.timeline import Span, Timeline
from tapestream.simulate.compose import composable, compose
from tapestream.simulate.explain import RuleBroken, action_at, describe, explained, sizes_of
from tapestream.simulate.judge import Judge
from tapestream.simulate.result import Simulation
from tapestream.simulate.walk import Walk
from tapestream.units import format_nbytes

_LONGEST_TIMELINE = 1_000_000
_LONGEST_RERUN = 200_000


def simulate(
    schedule: Schedule, profile: Profile, machine: Machine | None = None, budget: Budget | None = None
) -> Simulation:
    """Judge ``schedule`` for the chain that ``profile`` describes, by the rules of docs/ir.md.

    ``machine``: the links that copies use (None: copies take no time). Raises ScheduleError at the first broken rule,
    BudgetError if the peak of a tier exceeds ``budget`` (``least_nbytes`` is then that peak), InputError if schedule
    and profile differ in length or the machine lacks a link. Time is linear in actions. For equal stages without blocks
    and copies it is linear in the distinct situations of the tree's nodes instead (see `compose`).
    """
    if schedule.stages != len(profile):
        raise InputError(
            f"the schedule is for {schedule.stages} stages and the profile has {len(profile)}; "
            "plan again with this profile"
        )
    if composable(schedule, profile):
        simulation, stages = _composed(schedule, profile, machine)
    else:
        simulation, stages = _flat(schedule, profile, machine)
    if budget is not None:
        _check_budget(simulation, stages, schedule, budget)
    return simulation


def device_nbytes(schedule: Schedule, profile: Profile, machine: Machine | None = None) -> list[int]:
    """The most bytes on the device during each action; as `simulate` counts them, and raises."""
    judge = _Noting(schedule, profile, machine)
    judge.run()
    return judge.found


class _Noting(Judge):
    """Notes the peak of each action by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: list[int] = []

    def obey(self, action: Action) -> None:
        nbytes, peak = self.memory.nbytes, self.memory.peak
        peak[Tier.DEVICE] = nbytes[Tier.DEVICE]
        super().obey(action)
        self.found.append(max(peak[Tier.DEVICE], nbytes[Tier.DEVICE]))


def _flat(schedule: Schedule, profile: Profile, machine: Machine | None) -> tuple[Simulation, dict[Tier, int | None]]:
    """Judge action by action; also the stage at the peak of each tier."""
    judge = Judge(schedule, profile, machine)
    judge.run()
    clock, memory = judge.clock, judge.memory
    return Simulation(
        peak_nbytes={tier: memory.peak[tier] for tier in MEMORIES},
        peak_position={tier: memory.peak_position[tier] for tier in MEMORIES},
        makespan_seconds=clock.now,
        compute_seconds=clock.compute_seconds,
        stall_seconds=clock.stall_seconds,
        forwards=judge.forwards,
        recorded=judge.recorded,
        backwards=sum(stop - 1 - judge.due[start] for start, stop in profile.spans),
        phase_seconds=judge.phase_seconds,
        bytes_moved=judge.places.moved,
        updated={tier: frozenset(blocks) for tier, blocks in judge.blocks.where.items()},
        _trace=partial(_trace, schedule, profile, machine),
    ), {tier: memory.peak_stage[tier] for tier in MEMORIES}


def _composed(
    schedule: Schedule, profile: Profile, machine: Machine | None
) -> tuple[Simulation, dict[Tier, int | None]]:
    """Judge the tree; the stages at the peaks are left to be read off the actions there."""
    walk = Walk(profile)
    try:
        compose(schedule, walk)
    except RuleBroken as rule:
        if walk.position < _LONGEST_RERUN:  # only the flat judge gives its reasons in full
            Judge(schedule, profile, machine).run()
        raise explained(schedule, walk.position, str(rule)) from None
    cost, began, phases = profile.stages[0], 0.0, {}
    for phase, (forwards, recorded, backwards) in walk.phase_tallies.items():
        seconds = (forwards - recorded) * cost.forward_seconds + recorded * cost.recorded_seconds
        seconds += backwards * cost.backward_seconds + (phase is not PhaseKind.FORWARD) * profile.turn_seconds
        phases[phase], began = seconds - began, seconds
    return Simulation(
        peak_nbytes={Tier.DEVICE: walk.peak, Tier.HOST: 0, Tier.DISK: 0},
        peak_position={Tier.DEVICE: walk.peak_position, Tier.HOST: 0, Tier.DISK: 0},
        makespan_seconds=began,
        compute_seconds=began,
        stall_seconds=0.0,
        forwards=walk.forwards,
        recorded=walk.recorded,
        backwards=walk.backwards,
        phase_seconds=phases,
        bytes_moved={},
        updated={},
        _trace=partial(_trace, schedule, profile, machine),
    ), {}


def _trace(schedule: Schedule, profile: Profile, machine: Machine | None) -> Timeline:
    """Judge again, noting who was busy when."""
    if schedule.size > _LONGEST_TIMELINE:
        raise InputError(
            f"a timeline of {schedule.size} actions is too long, at most {_LONGEST_TIMELINE} are drawn; "
            "simulate a shorter chain"
        )
    judge = Judge(schedule, profile, machine, tracing=True)
    judge.run()
    clock = judge.clock
    spans = [Span(*span) for span in clock.spans or ()]
    spans += [Span(lane, name, job.start, job.end - job.start) for lane, name, job in clock.copies]
    spans.sort(key=lambda span: span.start_seconds)
    memory = {tier: tuple(_changes(judge.memory.samples[tier])) for tier in MEMORIES}
    return Timeline(tuple(spans), memory)


def _changes(samples: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """The samples at which the bytes differ from those before."""
    last = None
    for at, nbytes in samples:
        if nbytes != last:
            yield at, nbytes
        last = nbytes


def _check_budget(simulation: Simulation, stages: dict[Tier, int | None], schedule: Schedule, budget: Budget) -> None:
    for tier, peak in simulation.peak_nbytes.items():
        allowed = budget.nbytes(tier)
        if allowed is None or peak <= allowed:
            continue
        position = simulation.peak_position[tier]
        at_peak = action_at(schedule.root, position, sizes_of(schedule.root))
        action, stage = describe(at_peak), stages.get(tier, _stage_of(at_peak))
        where = "" if stage is None else f" in stage {stage}"
        raise BudgetError(
            f"this schedule reaches {format_nbytes(peak)} ({peak} bytes) in {tier.name}, {format_nbytes(allowed)} "
            f"({allowed} bytes) are allowed; the peak is at action {position}, {action}{where}. "
            f"Allow {peak} bytes there, or plan for the smaller budget",
            least_nbytes=peak,
            stage=stage,
        )


def _stage_of(action: Action) -> int | None:
    match action:
        case Forward(stage) | Record(stage) | Backward(stage):
            return stage
        case _:
            return None
