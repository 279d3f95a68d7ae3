"""Plans to choose from for the next call of a program: more of them the more often it comes."""

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.frontends.below import Below, plan_with
from tapestream.frontends.program.cuts import FEW, FEWER, MANY, Borders
from tapestream.frontends.program.groups import merged
from tapestream.frontends.program.holds import NOTHING, Holding, Holds
from tapestream.frontends.program.orders import Reversal, of_plan
from tapestream.frontends.program.tails import Tails
from tapestream.passes.memory import compute_seconds
from tapestream.planners import planners
from tapestream.planning.plan import Plan

FITTING = (FEW, 2 * FEW, 4 * FEW, MANY)
"""Stretches, where fewer do not fit."""
SLOW = 2
"""Times the seconds with everything stored, or forwards for each stage, from which on quick plans do not do."""
_WORTH_SECONDS = 1.0
"""Of what runs again, that is: about as long as a plan takes."""
_CALLS, _MOST_SECONDS = 200, 20.0
"""A search for better plans ends after the time that so many calls spend on what they run again, and after so much."""
_SHARES = (1, 0.85, 0.7, 0.5)
"""Of the budget, for a plan to which tails and values are added (see `Tails`, `Holds`)."""
_TAPERS = tuple(itertools.product((4, 6, 8.5, 13, 28), (1.1, 1.2)))
"""The part of the budget that the last stretch saves, and how much more an earlier one does (see `Borders.tapered`)."""


class Found(NamedTuple):
    """A plan, where its stretches begin, and what it holds (see `Holds`)."""

    plan: Plan
    cuts: Sequence[int]
    holding: Holding = NOTHING

    @property
    def reversal(self) -> Reversal:
        """What the first sweep keeps and backward runs again."""
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


def looked_for(ways: Sequence[Borders], room: Budget, below: Below) -> list[Found]:
    """Plans for as few stretches as do: by all planners, and where the fewest do not fit, by the best alone."""
    return [found for borders in ways for found in _looked_for(borders, room, below)]


def _looked_for(borders: Borders, room: Budget, below: Below) -> list[Found]:
    found, names = list[Found](), ("auto",)
    for cuts in (borders.cuts(most, timed=timed) for timed in (True, False) for most in FITTING):
        found += plans_by(borders, cuts, room, names, below)
        if found and not slow(found[-1], borders):
            break
        names = ("joint",) if below.tiers else ("rotor",)
    return found


def slow(found: Found, borders: Borders) -> bool:
    """Whether it pays to look for something better at once."""
    return found.plan.overhead > SLOW and found.again(borders) > _WORTH_SECONDS


def refined(ways: Sequence[Borders], before: Found, room: Budget, below: Below) -> list[Found]:
    """Plans by `rotor` for several numbers of stretches, and for those of ``before`` where these do not fit; then plans
    that run everything again once, for stretches of several lengths. Ends early where there is little to win, and
    leaves alone what takes more stretches than `MANY`."""
    if len(before.cuts) > MANY + 1:
        return []
    until = time.perf_counter() + min(_MOST_SECONDS, _CALLS * before.again(ways[0]))
    found = list[Found]()
    several = (_several(borders, before.cuts, room, below) for borders in ways)
    for one in itertools.chain.from_iterable(itertools.zip_longest(*several)):
        if one is not None:
            found.append(one)
        if time.perf_counter() > until:
            break
    return found


def plans_by(borders: Borders, cuts: Sequence[int], room: Budget, names: Sequence[str], below: Below) -> list[Found]:
    """Plans for the stretches between ``cuts`` by the planners ``names``, of those that find one."""
    profile, found = borders.profile(cuts), []
    for name in names:
        with contextlib.suppress(BudgetError):
            found.append(Found(plan_with(below, profile, room, name, {}), cuts))
    return found


def _several(borders: Borders, cuts: Sequence[int], room: Budget, below: Below) -> Iterator[Found]:
    none = True
    for fewer in (borders.suiting(numbers) for numbers in FEWER):
        for one in _added(borders, fewer, room, below):
            yield one
            none = False
    if none:
        yield from _added(borders, cuts, room, below)
    for part, growth in _TAPERS:
        yield from _once(borders, borders.tapered((room.device_nbytes or 0) / part, growth), room)


def _once(borders: Borders, cuts: Sequence[int], room: Budget) -> Iterator[Found]:
    """Every stretch runs again once but the last, which is recorded in the first sweep, with what fits beside that."""
    profile = borders.profile(cuts)
    with contextlib.suppress(BudgetError):
        schedule = planners["periodic"](profile, None, None, segments=len(profile))
        plan = Plan.judged(schedule, profile, room, None)
        yield from _with_parts(Found(plan, cuts), Tails(cuts, borders), Holds(cuts, borders), room, 1.0)


def _added(borders: Borders, cuts: Sequence[int], room: Budget, below: Below) -> Iterator[Found]:
    """Plans by `rotor` within the whole budget or a part of it, and the same with what fits beside them."""
    budget, profile = room.device_nbytes or 0, borders.profile(cuts)
    known: dict[tuple[int, ...], tuple[Tails, Holds]] = {}
    for share in _SHARES:
        plans = [Found(plan, cuts) for plan in _leaving(profile, budget, share, below)]
        fewer = (merged(one.plan, cuts, borders, budget) for one in plans)
        for one in (*plans, *(Found(*found) for found in fewer if found is not None)):
            if (key := tuple(one.cuts)) not in known:
                known[key] = Tails(key, borders), Holds(key, borders)
            yield from _with_parts(one, *known[key], room, share)


def _with_parts(one: Found, tails: Tails, holds: Holds, room: Budget, share: float) -> Iterator[Found]:
    """A plan within a ``share`` of the budget, and the same with what fits beside it of what it makes (see `Holds`),
    and of tails of its stretches and then that."""
    yield one
    budget, cuts, borders = room.device_nbytes or 0, one.cuts, holds.borders
    held = holds.added(one.plan, budget)
    if held is not None:
        yield Found(held[0], cuts, held[1])
    tailed = tails.added(one.plan, budget if held is None else int((1 + share) / 2 * budget))
    if tailed is not None:
        held = Holds(tailed[1], borders).added(tailed[0], budget)
        yield Found(*tailed) if held is None else Found(held[0], tailed[1], held[1])


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
