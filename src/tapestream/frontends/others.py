"""Calls of one front-end that hold a part of its budget while their backward has not run yet."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.frontends.available import free_nbytes
from tapestream.ir.actions import Tier
from tapestream.units import format_nbytes

_ADVICE = "run their backward first, drop their results, or allow"


def room_for_call(
    what: str, budget: Budget, live: Mapping[Tier, int], host: int | None, device: torch.device
) -> Budget:
    """Bytes for the next call in each tier, beside ``live`` bytes that calls hold; ``host``: of all in host memory.
    Raises BudgetError where they leave nothing of the device."""
    return Budget(
        left_on_device(what, budget, live[Tier.DEVICE], device),
        host=_left(host, live[Tier.HOST], budget.calls),
        disk=_left(budget.disk_nbytes, live[Tier.DISK], budget.calls),
    )


def _left(limit: int | None, live: int, calls: int) -> int | None:
    """Bytes of ``limit`` for one of ``calls`` calls at once, beside ``live`` bytes that such calls hold."""
    return None if limit is None else max(0, min(limit // calls, limit - live))


def left_on_device(what: str, budget: Budget, live: int, device: torch.device) -> int:
    """Bytes of the device for the next call. Raises BudgetError where such calls leave nothing of the budget."""
    limit = budget.device_nbytes
    whole = free_nbytes(device) + live if limit is None else limit
    if whole <= live:
        least = whole + live
        raise BudgetError(
            f"{what}: the budget of {limit} bytes is taken by calls whose backward has not run yet; {_ADVICE} more, "
            f"a part of it for each: Budget({least}, calls=2)",
            least_nbytes=least,
        )
    return max(1, _left(whole, live, budget.calls) or 0)


@contextlib.contextmanager
def beside_others(what: str, held: int, budget: Budget) -> Iterator[None]:
    """A BudgetError of what is inside becomes one of the whole budget, where such calls hold ``held`` bytes of it or
    it is for several at once."""
    try:
        yield
    except BudgetError as error:
        if error.least_nbytes is None or not (held or budget.calls > 1):
            raise
        limit = budget.device_nbytes or "what is free"
        if held + error.least_nbytes > budget.calls * error.least_nbytes:
            least = error.least_nbytes + held
            message = (
                f"{what}: calls whose backward has not run yet hold {format_nbytes(held)} of the budget "
                f"({limit} bytes), and the least found to work beside them is "
                f"{format_nbytes(least)} ({least} bytes) in all; {_ADVICE} that much"
            )
        else:
            least = error.least_nbytes * budget.calls
            message = (
                f"{what}: the budget ({limit} bytes) is for {budget.calls} calls at once (calls={budget.calls}), and "
                f"the least found to work for one is {format_nbytes(error.least_nbytes)}; allow {least} bytes, run the "
                "backward of one before the next, or use smaller inputs"
            )
        raise BudgetError(message, least_nbytes=least) from None
