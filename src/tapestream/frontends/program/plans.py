"""Plans for the next call of a program, and what backward does after a first sweep that no plan has led."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.executor.program.record.keeper import Kept
from tapestream.executor.program.record.tape import Tape
from tapestream.executor.program.replay.moves import Reads
from tapestream.frontends.below import NEVER_MOVE, Below, plan_with
from tapestream.frontends.program.call import Sweep
from tapestream.frontends.program.cuts import FEW, FEWER, MANY, Borders, binomial_slots
from tapestream.frontends.program.groups import merged
from tapestream.frontends.program.holds import NOTHING, Holding, Holds
from tapestream.frontends.program.leanest import FINEST, leanest
from tapestream.frontends.program.orders import Reversal, of_gaps, of_plan, transfers
from tapestream.frontends.program.tails import Tails
from tapestream.frontends.program.watch import Turn
from tapestream.ir import Action, Forward, Kind, Offload, Phase, Record, Restore, Schedule
from tapestream.passes.memory import compute_seconds
from tapestream.planners import planners
from tapestream.planning.plan import Plan
from tapestream.simulate import simulate
from tapestream.units import format_nbytes

_QUICK = ("store_all", "periodic", "least_peak", "revolve")
"""What "auto" tries at once, in milliseconds; better plans follow when the same sequence comes again (see `LOOKS`)."""
_FITTING = (FEW, 2 * FEW, 4 * FEW, MANY)
"""Stretches, where fewer do not fit."""
_STRETCHES = {"auto": (MANY, *_FITTING[1:3], FINEST), "superneurons": (FINEST, MANY, FEW)}
"""How many are tried, one after the other: few by planners with tables. SuperNeurons goes by single operations."""
_SLOW = 2
"""Times the seconds with everything stored, or forwards for each stage, from which on quick plans do not do."""
_WORTH_SECONDS = 1.0
"""Of what runs again, that is: about as long as a plan takes."""
_CALLS = 200
"""A search for better plans ends after the time that so many calls spend on what they run again."""
_SHARES = (1, 0.85, 0.7, 0.5)
"""Of the budget, for a plan to which tails and values are added (see `Tails`, `Holds`)."""
LOOKS = 2
"""How often a better plan is looked for by "auto": all planners, then several numbers of stretches with tails."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan for the program whose record has this ``shape``. ``holding``: see `Holds`; ``turns``: what the first
    sweep does at each stretch, and at the end; ``saved``: bytes saved before each; ``reads``: see `Moves`. ``looks``:
    how often a better plan has been looked for, `LOOKS` times at most. ``slots``: of a second backward."""

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

    @classmethod
    def unplanned(cls, shape: Any) -> "Prepared":
        """The shape alone, to know it again."""
        return cls(shape, None)

    @property
    def moves(self) -> bool:
        """Whether anything goes below the device."""
        return self.plan is not None and bool(self.plan.simulation.bytes_moved)

    def fits(self, room: Budget) -> bool:
        """Whether there is a plan that fits into ``room``."""
        peaks = {} if self.plan is None else self.plan.simulation.peak_nbytes
        limits = ((nbytes, room.nbytes(tier)) for tier, nbytes in peaks.items())
        return self.plan is not None and all(limit is None or nbytes <= limit for nbytes, limit in limits)


def prepare(
    borders: Borders, shape: Any, room: Budget, planner: str, before: Prepared | None, below: Below
) -> Prepared:
    """The plan for the next call that makes the same operations. ``before``: what "auto" has found so far; the more
    often a sequence comes, the longer it may look."""
    looks, found = 0, list[_Found]()
    if before is not None and before.plan is not None:
        looks = before.looks + 1
        better = _looked_for(borders, room, below) if looks == 1 else _refined(borders, before, room, below)
        found = [_Found(before.plan, before.cuts, before.holding), *better]
    else:
        sizes = _STRETCHES.get(planner, (FEW, MANY, FINEST))
        names = _QUICK if planner == "auto" else (planner,)
        cuts_tried = (borders.cuts(most, timed=timed) for timed in (True, False) for most in sizes)
        tried = (_plans(borders, cuts, room, names, below) for cuts in cuts_tried)
        found = next(filter(None, tried), [])
        if found and planner == "auto" and all(_slow(one, borders) for one in found):
            found += _looked_for(borders, room, below)
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
        shape, plan, cuts, reversal, holding, turns, saved, reads, unread, len(borders.record), slots, looks
    )


def _turns(found: "_Found", reversal: Reversal, borders: Borders) -> tuple[dict[int, Turn], dict[int, Reads]]:
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


class _Found(NamedTuple):
    """A plan, where its stretches begin, and what it holds (see `Holds`)."""

    plan: Plan
    cuts: Sequence[int]
    holding: Holding = NOTHING

    @property
    def reversal(self) -> Reversal:
        return of_plan(self.plan.schedule)

    def again(self, borders: Borders) -> float:
        """Seconds of what backward runs again: the first sweep is the same for all plans, and planners do not know that
        a stretch that is run for what it saves need not be run as a whole."""
        saves = [borders.needed_seconds(a, b, *self.holding.at(a)) for a, b in pairwise(self.cuts)]
        profile = self.plan.profile
        again, waits = self.reversal.again([cost.forward_seconds for cost in profile.stages], saves), 0.0
        if self.plan.simulation.bytes_moved:
            waits = self.plan.seconds - sum(compute_seconds(action, profile) for action in self.plan.schedule)
        return again + waits


def _looked_for(borders: Borders, room: Budget, below: Below) -> list[_Found]:
    """Plans for as few stretches as do: by all planners, and where the fewest do not fit, by the best alone."""
    found, names = list[_Found](), ("auto",)
    for cuts in (borders.cuts(most, timed=timed) for timed in (True, False) for most in _FITTING):
        found += _plans(borders, cuts, room, names, below)
        if found and not _slow(found[-1], borders):
            break
        names = ("joint",) if below.tiers else ("rotor",)
    return found


def _slow(found: "_Found", borders: Borders) -> bool:
    """Whether it pays to look for something better at once."""
    return found.plan.overhead > _SLOW and found.again(borders) > _WORTH_SECONDS


def _refined(borders: Borders, before: Prepared, room: Budget, below: Below) -> list[_Found]:
    """Plans by `rotor` for several numbers of stretches; for those of ``before`` where these do not fit. Ends
    early where there is little to win."""
    assert before.plan is not None
    until = time.perf_counter() + _CALLS * _Found(before.plan, before.cuts, before.holding).again(borders)
    found = list[_Found]()
    for cuts in (*(borders.suiting(numbers) for numbers in FEWER), before.cuts):
        if cuts is before.cuts and found:
            break
        for one in _added(borders, cuts, room, below):
            found.append(one)
            if time.perf_counter() > until:
                return found
    return found


def _added(borders: Borders, cuts: Sequence[int], room: Budget, below: Below) -> Iterator[_Found]:
    """Plans by `rotor` within the whole budget or a part of it, and the same with what fits beside them of what they
    make (see `Holds`), and of tails of their stretches and then that."""
    budget, profile = room.device_nbytes or 0, borders.profile(cuts)
    known: dict[tuple[int, ...], tuple[Tails, Holds]] = {}
    for share in _SHARES:
        plans = [_Found(plan, cuts) for plan in _leaving(profile, budget, share, below)]
        fewer = (merged(one.plan, cuts, borders, budget) for one in plans)
        for one in (*plans, *(_Found(*found) for found in fewer if found is not None)):
            yield one
            if (key := tuple(one.cuts)) not in known:
                known[key] = Tails(key, borders), Holds(key, borders)
            tails, holds = known[key]
            held = holds.added(one.plan, budget)
            if held is not None:
                yield _Found(held[0], key, held[1])
            tailed = tails.added(one.plan, budget if held is None else int((1 + share) / 2 * budget))
            if tailed is not None:
                held = Holds(tailed[1], borders).added(tailed[0], budget)
                yield _Found(*tailed) if held is None else _Found(held[0], tailed[1], held[1])


def _leaving(profile: Profile, budget: int, share: float, below: Below) -> Iterator[Plan]:
    """Plans by `rotor` that leave all but a share of the budget: all the time, or, where gradients come to take that
    room, at the turn alone."""
    with contextlib.suppress(BudgetError):
        yield plan_with(below, profile, Budget(int(share * budget)), "rotor", {})
    if share < 1 and any(cost.gradient_nbytes for cost in profile.stages):
        less = replace(profile, turn_nbytes=int((1 - share) * budget))
        with contextlib.suppress(BudgetError):
            plan = plan_with(below, less, Budget(budget), "rotor", {})
            yield Plan.judged(plan.schedule, profile, Budget(budget), None, plan.alternatives)


def _plans(borders: Borders, cuts: Sequence[int], room: Budget, names: Sequence[str], below: Below) -> list[_Found]:
    profile, found = borders.profile(cuts), []
    for name in names:
        with contextlib.suppress(BudgetError):
            found.append(_Found(plan_with(below, profile, room, name, {}), cuts))
    return found


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
                    raise _too_small(least, budget) from None
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
        if len(profile) <= MANY and (schedule is None or _forwards(schedule) > _SLOW * len(profile)):
            with contextlib.suppress(BudgetError):
                return planners["rotor"](profile, budget, None)
        if schedule is not None:
            return schedule
        return planners["revolve"](profile, None, None, slots=binomial_slots(profile, budget.device_nbytes or 0))

    return plan


def _forwards(schedule: Schedule) -> int:
    return sum(a.stop - a.start if isinstance(a, Forward) else isinstance(a, Record) for a in schedule)


def _too_small(least: int, budget: int) -> BudgetError:
    return BudgetError(
        f"Program: a budget of {format_nbytes(budget)} ({budget} bytes) was asked for, but the least found to work is "
        f"{format_nbytes(least)} ({least} bytes), with the stretches as short as they may be; allow that much, or make "
        "the tensors smaller (less batch)",
        least_nbytes=least,
    )
