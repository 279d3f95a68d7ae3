"""Everything stored: what plain PyTorch does, and the schedule that overhead is measured against."""

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Node, Phase, PhaseKind, Schedule, Series
from tapestream.planners._fit import first_fit
from tapestream.planners._recurrences import turn

NAME = "store_all"


def plan(profile: Profile, budget: Budget | str | int | None = None, machine: Machine | None = None) -> Schedule:
    """Record every stage, then run backward: the fastest schedule, and usually the one of largest peak.

    The tree has a constant number of nodes. Raises BudgetError when the tape is larger than the budget.
    """
    return first_fit(NAME, [stored(len(profile))], profile, budget)


def stored(n: int) -> Node:
    """The tree of ``n`` stages recorded and reversed."""
    return Series((Phase(PhaseKind.FORWARD), *turn(0, n)))
