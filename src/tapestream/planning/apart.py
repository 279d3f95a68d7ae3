"""Plans within a budget for profiles of which values share storages, by planners that count each value by itself."""

from tapestream.errors import BudgetError
from tapestream.ir import Tier
from tapestream.planning.choices import Terms
from tapestream.planning.fastest import Found, judged_as, spared
from tapestream.planning.split import Tapes
from tapestream.simulate import simulate

_TRIES = 2
_SHARED = 1.25
"""Times the budget, as the planner counts, from which on a schedule is hardly ever within it as the judge counts."""
_FULL = 0.97  # of the budget


def best_apart(tapes: Tapes, terms: Terms) -> Found:
    """The fastest schedule found that the judge accepts. Where values share storages, the planner is asked for budgets
    above that of ``terms``, too, since it counts bytes several times that are there once. Raises BudgetError with the
    least peak found.

    Two budgets: the second one differs by what the first schedule leaves of the real one, or takes too much.
    """
    if terms.profile.shared is None:
        return spared(judged_as(tapes.within(terms.budget), terms), terms)
    limit, best, least = terms.budget.device_nbytes, None, None
    asked = limit
    for _ in range(_TRIES):
        try:
            schedule = tapes.within(terms.budget.with_device(asked))
        except BudgetError as error:
            if limit is None or error.least_nbytes is None or error.least_nbytes > _SHARED * limit:
                least = least or error.least_nbytes
                break
            asked = error.least_nbytes
            schedule = tapes.within(terms.budget.with_device(asked))
        found = Found(schedule, simulate(schedule, terms.profile, terms.machine), frozenset())
        peak = found.simulation.peak_nbytes[Tier.DEVICE]
        if asked is None or limit is None:
            return found
        if peak <= limit:
            if best is None or (found.seconds, peak) < (best.seconds, best.simulation.peak_nbytes[Tier.DEVICE]):
                best = found
            if peak > _FULL * limit or found.simulation.forwards == terms.profile.runs:
                break
        else:
            least = min(least or peak, peak)
        asked = int(asked * limit / peak)
    if best is None:
        raise BudgetError("each value counted once takes more", least_nbytes=least)
    return best
