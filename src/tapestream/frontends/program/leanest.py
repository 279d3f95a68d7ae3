"""The minimum-memory fallback: the whole program runs again, in backward or before it, in as little memory as is found.

The fallback ignores the budget. If it fits one budget, it fits every larger one.
"""

import functools
from collections.abc import Iterator

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError
from tapestream.frontends.below import NEVER_MOVE
from tapestream.frontends.program.cuts import FEW, MANY, Borders
from tapestream.frontends.program.orders import Reversal, all_at_once, of_gaps
from tapestream.ir import Schedule, Tier
from tapestream.planners import planners
from tapestream.simulate import simulate

FINE, FINEST = 4 * MANY, 16 * MANY
"""Numbers of segments: many, and most."""
TABLED = 64
"""Segments, at most, for which `rotor` is asked whether it needs less than `revolve`: hardly ever, and its tables take
ten seconds for 256."""


def leanest(borders: Borders, planner: str, budget: int) -> tuple[int, list[int], Reversal]:
    """Peak, where segments begin, and the backward. Coarse segments are tried before fine ones: the first that fits
    into ``budget`` bytes is taken, else that of least peak. Segments are cut by bytes alone, so that every call finds
    the same.
    """
    found, most = list[tuple[int, list[int], Reversal]](), FEW
    while True:
        cuts = borders.cuts(most, timed=False)
        for way in borders.ways:
            found += ((peak, cuts, reversal) for peak, reversal in _backwards(way.profile(cuts), planner))
        best = min(found, key=lambda one: one[0])
        if best[0] <= budget or most >= min(FINEST, len(borders.record)):
            return best
        most *= 2


def _backwards(profile: Profile, planner: str) -> Iterator[tuple[int, Reversal]]:
    names: tuple[str, ...] = ("least_peak", "revolve", *(("rotor",) if len(profile) <= TABLED else ()))
    for name in (planner,) if planner in NEVER_MOVE else names:
        plan = functools.partial(_leanest_of, name)
        found = of_gaps(profile, [0], len(profile), 0, plan, waiting=False)
        yield _peak(found, profile), found
    if planner not in NEVER_MOVE:
        found = all_at_once(profile)
        yield _peak(found, profile), found


def _peak(found: Reversal, profile: Profile) -> int:
    return simulate(found.schedule, profile, None, None).peak_nbytes[Tier.DEVICE]


def _leanest_of(name: str, profile: Profile, _: Budget) -> Schedule:
    """The planner's schedule of least peak."""
    try:
        return planners[name](profile, Budget(1), None)
    except BudgetError as error:
        return planners[name](profile, Budget(error.least_nbytes), None)
