"""Divide and conquer by halves (Siskind & Pearlmutter 2018; Griewank 1992)."""

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Schedule
from tapestream.planners._fit import first_fit, positive
from tapestream.planners._recurrences import Part, divide

NAME = "bisection"


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    base_case: int = 1,
) -> Schedule:
    """Cut the chain in halves, right half first, down to parts of at most ``base_case`` stages, which are recorded.

    T(L) = L div 2 + T(L - L div 2) + T(L div 2) forwards (recorded ones included), T(L <= base_case) = L: about
    (L/2) log2 L, and ceil(log2 L) restart checkpoints (the published count has one more, the state
    from which a single stage is recorded; here that state is live and not kept). Halving is not optimal: `revolve`
    needs fewer forwards with as many slots. Cuts ignore bytes and seconds. Raises BudgetError when the schedule
    does not fit, InputError for a base case below 1.
    """
    base = positive(NAME, "base_case", base_case, len(profile))

    def halves(part: Part) -> tuple[Part, Part] | None:
        left = part.length // 2
        return None if part.length <= base else (Part(left), Part(part.length - left))

    return first_fit(NAME, [divide(len(profile), 0, halves)], profile, budget)
