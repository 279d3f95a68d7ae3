"""Three budgets that a refusal names, with their time: the least, the knee, and the one that is as fast as plain."""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Protocol

from tapestream.errors import Allowance, BudgetError

KNEE = 1.5
"""Times plain PyTorch's time, at most, at the budget that is called the knee."""

_HALVINGS = 4  # of the way between the least and all, in powers


class PlannedStep(Protocol):
    """A plan, or what is known of one: bytes of the device at the peak, seconds of a step, these as a multiple of
    the seconds with everything stored, and what fills the device at the peak."""

    @property
    def peak_nbytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def overhead(self) -> float: ...

    @property
    def fills(self) -> Mapping[str, int]: ...


def allowances(plan_within: Callable[[int | None], PlannedStep], least_nbytes: int) -> tuple[Allowance, ...]:
    """The least budget, the smallest found within which a step takes at most `KNEE` times plain PyTorch's time, and the
    smallest found that is as fast as any; each once, by bytes.

    ``plan_within``: the plan within so many bytes of the device (None: no limit); raises BudgetError. Where everything
    stored takes no more than ``least_nbytes``, that is the one budget.
    """
    everything = plan_within(None)
    found = [_allowance("all", everything.peak_nbytes, everything)]
    if everything.peak_nbytes <= least_nbytes:
        return tuple(found)
    least = _at_least(plan_within, least_nbytes)
    if least is not None:
        knee = _knee(plan_within, least, found[0])
        found[:0] = [least] if knee is None else [least, knee]
    return tuple(found)


def _at_least(plan_within: Callable[[int | None], PlannedStep], nbytes: int) -> Allowance | None:
    """The one that was said, or what is refused instead: planners round."""
    for _ in range(3):
        try:
            return _allowance("least", nbytes, plan_within(nbytes))
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes <= nbytes:
                return None
            nbytes = error.least_nbytes
    return None


def _knee(plan_within: Callable[[int | None], PlannedStep], least: Allowance, most: Allowance) -> Allowance | None:
    """None where the least is that quick already, or nothing between both."""
    low, high, best = least.nbytes, most.nbytes, None
    if least.times_plain <= KNEE:
        return None
    for _ in range(_HALVINGS):
        nbytes = int(sqrt(low * high))
        try:
            found = _allowance("knee", nbytes, plan_within(nbytes))
        except BudgetError:
            low = nbytes
            continue
        if found.times_plain <= KNEE:
            best, high = found, nbytes
        else:
            low = nbytes
    return best


def _allowance(name: str, nbytes: int, plan: PlannedStep) -> Allowance:
    fills = sorted(plan.fills.items(), key=lambda item: -item[1])
    return Allowance(name, nbytes, plan.seconds, plan.overhead, tuple(fills))
