"""Plans for the next call of a program, and what backward does after a first sweep that no plan has led."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tapestream.costs import Budget, Profile
from tapestream.errors import Allowance, BudgetError
from tapestream.executor.program.record.keeper import Kept
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Reads
from tapestream.frontends.below import NEVER_MOVE, Below
from tapestream.frontends.program.call import Sweep
from tapestream.frontends.program.candidates import FITTING, SLOW, Found, looked_for, plans_by, refined, slow
from tapestream.frontends.program.cuts import FEW, MANY, Borders, binomial_slots
from tapestream.frontends.program.holds import NOTHING, Holding
from tapestream.frontends.program.leanest import FINE, FINEST, TABLED, leanest
from tapestream.frontends.program.orders import Reversal, of_gaps, transfers
from tapestream.frontends.program.unreached import Unreached
from tapestream.frontends.program.watch import Turn
from tapestream.ir import Action, Forward, Kind, Offload, Phase, Record, Restore, Schedule
from tapestream.planners import planners
from tapestream.planning.allowances import allowances
from tapestream.planning.auto import make_plan
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate
from tapestream.units import format_nbytes

_QUICK = ("store_all", "periodic", "least_peak", "revolve")
"""What "auto" tries at once, in milliseconds; better plans follow when the same sequence comes again (see `LOOKS`)."""
_STRETCHES = {"auto": (MANY, *FITTING[1:3], FINE, FINEST), "superneurons": (FINE, MANY, FEW)}
"""How many are tried, one after the other: few by planners with tables. SuperNeurons goes by single operations."""
_LONG = 20_000
"""Operations."""
LOOKS = 2
"""How often a better plan is looked for by "auto": all planners, then several numbers of stretches with tails."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for the program whose record has this ``shape``. ``holding``: see `Holds`; ``turns``: what the first
    sweep does at each stretch, and at the end; ``saved``: bytes saved before each; ``reads``: see `Moves`. ``looks``:
    how often a better plan has been looked for, `LOOKS` times at most. ``slots``: of a second backward. ``unreached``:
    what the plan leaves out."""

    shape: Any
    plan: Plan | None
    cuts: Sequence[int] = field(default_factory=list)
    reversal: Reversal | None = None
    holding: Holding = NOTHING
    turns: dict[int, Turn] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    reads: dict[int, Reads] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    operations: int = 0
    slots: int = 1
    looks: int = 0
    unreached: Unreached | None = None

    @classmethod
    def unplanned(cls, shape: Any) -> "Prepared":
        """The shape alone, to know it again."""
        return cls(shape, None)

    @property
    def moves(self) -> bool:
        """Whether anything goes below the device."""
        return self.plan is not None and bool(self.plan.simulation.bytes_moved)

    @property
    def keeps_all(self) -> bool:
        """Whether all that is saved stays where it is."""
        return self.reversal is not None and len(self.reversal.recorded) == len(self.cuts) - 1 and not self.moves

    def fits(self, room: Budget) -> bool:
        """Whether there is a plan that fits into ``room``."""
        peaks = {} if self.plan is None else self.plan.simulation.peak_nbytes
        limits = ((nbytes, room.nbytes(tier)) for tier, nbytes in peaks.items())
        if self.unreached is not None and self.unreached.least_nbytes <= (room.device_nbytes or 0):
            return False  # there is room for one that leaves nothing out
        return self.plan is not None and all(limit is None or nbytes <= limit for nbytes, limit in limits)


def prepare(
    borders: Borders,
    shape: Any,
    room: Budget,
    planner: str,
    before: Prepared | None,
    below: Below,
    unreached: Unreached | None = None,
) -> Prepared:
    """The plan for the next call that makes the same operations. ``before``: what "auto" has found so far; the more
    often a sequence comes, the longer it may look."""
    looks, found, ways = 0, list[Found](), _ways(borders, planner, below)
    if before is not None and before.plan is not None:
        looks, known = before.looks + 1, Found(before.plan, before.cuts, before.holding)
        better = looked_for(ways, room, below) if looks == 1 else refined(ways, known, room, below)
        found = [known, *better]
    else:
        found = [one for way in ways for one in _at_once(way, room, planner, below)]
    if not found:
        return Prepared.unplanned(shape)
    plan, cuts, holding = best = min(found, key=lambda one: (one.again(borders), one.plan.peak_nbytes))
    reversal = best.reversal
    by_operation = borders.sizes.saved_before()
    saved = {cut: int(by_operation[cut]) for cut in cuts[:-1]}
    turns, reads = _turns(best, reversal, borders)
    if (len(reversal.recorded) == len(plan.profile) and not reads) or planner != "auto":
        looks = LOOKS
    slots = binomial_slots(plan.profile, room.device_nbytes or 0)
    unread = borders.record.unread.storages
    return Prepared(
        shape, plan, cuts, reversal, holding, turns, saved, reads, unread, len(borders.record), slots, looks, unreached
    )


def _at_once(borders: Borders, room: Budget, planner: str, below: Below) -> list[Found]:
    """Plans in as long as a first call may take: for the first numbers of stretches that fit, and by "auto" for more of
    them as long as all are slow, then by all planners."""
    names, found = _QUICK if planner == "auto" else (planner,), list[Found]()
    for timed in (True, False):
        for most in _STRETCHES.get(planner, (FEW, MANY, FINE, FINEST)):
            if found and min(most, len(borders.record)) < len(found[-1].cuts):
                continue
            more = plans_by(borders, borders.cuts(most, timed=timed), room, names, below)
            found += more
            if more and not (planner == "auto" and all(slow(one, borders) for one in more)):
                return found
        if found:
            return found + looked_for((borders,), room, below)
    return []


def _ways(borders: Borders, planner: str, below: Below) -> tuple[Borders, ...]:
    """Those in which states are counted for plans by ``planner``."""
    return borders.ways if not below.tiers and (planner == "auto" or planner in NEVER_MOVE) else (borders,)


def _turns(found: Found, reversal: Reversal, borders: Borders) -> tuple[dict[int, Turn], dict[int, Reads]]:
    """By operation what the first sweep does, by stretch whose saved tensors move what its backward reads."""
    plan, cuts, _ = found
    moves = transfers(plan.schedule) if plan.simulation.bytes_moved else {}
    offloads = (action.value for action in plan.schedule if isinstance(action, Offload))
    moving = {value.index for value in offloads if value.kind is Kind.SAVED}
    stages = plan.profile.stages
    reads = {stage: (stages[stage].reads_input, stages[stage].reads_output) for stage in moving}
    turns = {}
    for stage, cut in enumerate(cuts):
        needed = borders.sizes.needed(cut) if stage in reversal.kept or {stage - 1, stage} & moving else None
        keep = needed if stage in reversal.kept else None
        turns[cut] = Turn(keep, stage in reversal.recorded, stage, needed, moves.get(stage, ()))
    return turns, reads


def after_sweep(
    found: Sweep, borders: Borders, taped: int | None, tape: Tape, budget: int, planner: str
) -> tuple[list[int], Reversal, int]:
    """Backward after a first sweep whose restart checkpoints, and the tape from operation ``taped`` on, were kept as it
    went on; less of both, where that does not fit. Raises BudgetError with the least that would do, which does not
    depend on measured seconds: the next call, whose seconds are others, has to find it too."""
    n, kept, most, timed = len(found.record), found.keeper.kept, FEW, True
    start = n if taped is None else taped
    for operation in [k for k, one in kept.items() if k and not (borders.allowed[k] and _complete(one, borders))]:
        del kept[operation]
    for operation, one in kept.items():  # a plan for another sequence may have had more held
        needed = borders.sizes.needed(operation)
        one.entries = {number: entry for number, entry in one.entries.items() if number in needed}
        one.saves.clear()
    if budget < borders.sizes.bound_nbytes:  # no other question than what the least is
        raise too_small(borders, planner, leanest(borders, planner, budget)[0], budget)
    while True:
        while not borders.allowed[start]:
            start += 1
        cuts = borders.cuts(most, {*kept, start}, timed=timed)
        profile = borders.profile(cuts)
        starts = [cuts.index(operation) for operation in sorted(kept) if operation < start]
        try:
            reversal = _reversal(profile, starts, cuts.index(start), budget, planner)
            break
        except BudgetError:
            if start < n:
                start = min((k for k in kept if k > start), default=n)
            elif len(kept) > 1:
                for operation in sorted(kept)[1::2]:
                    del kept[operation]
            elif timed:
                timed = False
            elif most < FINEST and most < n:
                most *= 2
            else:
                least, cuts, reversal = leanest(borders, planner, budget)
                if least > budget:
                    raise too_small(borders, planner, least, budget) from None
                profile = borders.profile(cuts)
                break
    _drop_unneeded(kept, tape, start)
    return cuts, reversal, binomial_slots(profile, budget)


def _reversal(profile: Profile, starts: Sequence[int], taped: int, budget: int, planner: str) -> Reversal:
    """Gap by gap, with room for what waits at their ends where it does not fit without. Raises BudgetError."""
    plan = _planned_by(planner)
    try:
        found = of_gaps(profile, starts, taped, budget, plan, waiting=False)
        simulate(found.schedule, profile, None, Budget(budget))
    except BudgetError:
        found = of_gaps(profile, starts, taped, budget, plan, waiting=True)
        simulate(found.schedule, profile, None, Budget(budget))
    return found


def _complete(kept: Kept, borders: Borders) -> bool:
    """Not so where a plan for another sequence has said what to keep."""
    return borders.sizes.needed(kept.operation) <= kept.entries.keys()


def _drop_unneeded(kept: dict[int, Kept], tape: Tape, start: int) -> None:
    for operation in [k for k in kept if k >= max(1, start)]:
        del kept[operation]
    for operation in [k for k in tape.saved if k < start]:
        del tape.saved[operation]


def again(slots: int, stages: int) -> list[Action]:
    """Reverse the first stages from the state before them, kept as stage 0."""
    schedule = planners["revolve"](Profile.uniform(stages), None, None, slots=min(slots, stages))
    return [Restore(0), *(action for action in schedule if not isinstance(action, Phase))]


def _planned_by(planner: str) -> Any:
    def plan(profile: Profile, budget: Budget) -> Schedule:
        if planner in NEVER_MOVE:
            return planners[planner](profile, budget, None)
        for name in ("store_all", "periodic"):
            with contextlib.suppress(BudgetError):
                return planners[name](profile, budget, None)
        schedule: Schedule | None = None
        with contextlib.suppress(BudgetError):
            schedule = planners["revolve"](profile, budget, None)
        most = TABLED if schedule is None else MANY
        if len(profile) <= most and (schedule is None or _forwards(schedule) > SLOW * len(profile)):
            with contextlib.suppress(BudgetError):
                return planners["rotor"](profile, budget, None)
        if schedule is not None:
            return schedule
        return planners["revolve"](profile, None, None, slots=binomial_slots(profile, budget.device_nbytes or 0))

    return plan


def _forwards(schedule: Schedule) -> int:
    return sum(a.stop - a.start if isinstance(a, Forward) else isinstance(a, Record) for a in schedule)


def too_small(borders: Borders, planner: str, least: int, budget: int) -> BudgetError:
    """The refusal of a call for which ``least`` bytes are the fewest found to work."""
    return BudgetError(
        f"Program: a budget of {format_nbytes(budget)} ({budget} bytes) was asked for, but the least found to work is "
        f"{format_nbytes(least)} ({least} bytes), with the shortest segments; allow that much, or make the tensors "
        "smaller (a smaller batch)",
        least_nbytes=least,
        offers=partial(_offers, borders, planner, least),
    )


def _offers(borders: Borders, planner: str, least_nbytes: int) -> tuple[Allowance, ...]:
    """Budgets at which such a call works: by quick planners, as the call after the first has it. None for a program so
    long that nobody waits for an error about it."""
    if len(borders.record) > _LONG:
        return ()
    profiles = [borders.profile(borders.cuts(most, timed=False)) for most in (FEW, MANY, FINE)]

    def within(nbytes: int | None) -> Plan:
        found = list[Plan]()
        for profile, name in itertools.product(profiles, _QUICK if planner == "auto" else (planner,)):
            with contextlib.suppress(BudgetError):
                found.append(make_plan(profile, nbytes, planner=name))
        if not found:
            peak, cuts, reversal = leanest(borders, planner, nbytes or 0)
            if peak > least_nbytes:
                raise BudgetError("", least_nbytes=peak)
            found.append(Plan.judged(reversal.schedule, borders.profile(cuts), Budget(None), None))
        return min(found, key=lambda plan: (plan.seconds, plan.peak_nbytes))

    return allowances(within, least_nbytes)
