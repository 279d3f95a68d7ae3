"""Calls of one front-end that hold a part of its budget while their backward has not run yet."""

import contextlib
from collections.abc import Iterator

from tapestream.errors import BudgetError
from tapestream.units import format_nbytes

_ADVICE = "run their backward first, drop their results, or allow"


def check_left(what: str, left: int | None, limit: int | None) -> None:
    """Raise BudgetError where such calls leave nothing of ``limit`` bytes."""
    if left is not None and left <= 0:
        raise BudgetError(
            f"{what}: the budget of {limit} bytes is taken by calls whose backward has not run yet; {_ADVICE} more"
        )


@contextlib.contextmanager
def beside_others(what: str, held: int, limit: int | None) -> Iterator[None]:
    """A BudgetError of what is inside becomes one of the whole budget, of ``limit`` bytes (None: what is free), where
    such calls hold ``held`` bytes of it."""
    try:
        yield
    except BudgetError as error:
        if not held or error.least_nbytes is None:
            raise
        least = error.least_nbytes + held
        raise BudgetError(
            f"{what}: calls whose backward has not run yet hold {format_nbytes(held)} of the budget "
            f"({limit or 'what is free'} bytes), and the least found to work beside them is "
            f"{format_nbytes(least)} ({least} bytes) in all; {_ADVICE} that much",
            least_nbytes=least,
        ) from None
