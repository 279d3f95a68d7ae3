"""A part of the budget for each of several calls that await their backward at once."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tapestream.errors import BudgetError
from tapestream.units import format_nbytes

if TYPE_CHECKING:
    from tapestream.frontends.module.plans.prepare import Prepared

_TRIES = 6  # plans between the least and the most that one call may have


class Within(NamedTuple):
    """Device bytes, and how many calls of one kind must fit in them at once; with ``strict=False`` the others may turn
    out to be smaller: where not even the leanest plan fits that often, it is taken all the same."""

    nbytes: int
    calls: int = 1
    strict: bool = True


def for_calls(plan: Callable[[int], "Prepared"], within: Within) -> "Prepared":
    """What ``plan`` makes with the most bytes such that so many calls like this one fit ``within`` what they share: all
    of them hold what stays on the device, and each the rest for itself.

    Raises BudgetError, with bytes within which they fit, where even the leanest plan is too much.
    """
    allowed, calls, strict = within
    if calls == 1:
        return plan(allowed)

    def together(one: "Prepared") -> int:
        return one.shared_nbytes + calls * one.held_nbytes

    with suppress(BudgetError):
        most = plan(allowed)
        if together(most) <= allowed:
            return most
    best, least = _leanest(plan)
    if together(best) > allowed and (strict or best.shared_nbytes + best.held_nbytes > allowed):
        raise BudgetError(
            f"a budget of {format_nbytes(allowed)} was asked for, for {calls} calls that await their backward at once: "
            f"one call needs at least {format_nbytes(least)}, of which all calls share "
            f"{format_nbytes(best.shared_nbytes)}; allow {together(best)} bytes, use smaller batches, or run the "
            "backward of one before the next",
            least_nbytes=together(best),
        )
    if together(best) > allowed:
        return best
    # A smaller part leaves less of the parameters on the device, so that more of it is each call's own: what all share
    # in the leanest plan gives the least part that may be the best one.
    below, above = best.shared_nbytes + (allowed - best.shared_nbytes) // calls, allowed
    part = max(below, least)
    for _ in range(_TRIES):
        try:
            found = plan(part)
        except BudgetError:  # a planner's list need not hold what it held with less
            break
        if together(found) <= allowed:
            best, below = found, part
        else:
            above = part
        if above - below <= allowed // 100:
            break
        part = (below + above) // 2
    return best


def _leanest(plan: Callable[[int], "Prepared"]) -> tuple["Prepared", int]:
    """The plan that needs least, and its bytes."""
    nbytes = 1
    while True:
        try:
            return plan(nbytes), nbytes
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes <= nbytes:
                raise  # the host or the disk is too small
            nbytes = error.least_nbytes
