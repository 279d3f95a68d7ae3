"""`Refusals`: what did not fit is known from then on, and refused without looking again."""

from collections.abc import Callable
from typing import TypeVar

from tapestream.errors import BudgetError

T = TypeVar("T")


class Refusals:
    """Of one streamed model, until its plans are forgotten."""

    def __init__(self) -> None:
        self._known: dict[object, BudgetError] = {}

    def clear(self) -> None:
        """Look again."""
        self._known.clear()

    def once(self, key: object, plan: Callable[[], T]) -> T:
        """What ``plan`` gives. Raises BudgetError where it does, and does not ask it again for this ``key``."""
        if key in self._known:
            raise _anew(self._known[key])
        try:
            return plan()
        except BudgetError as error:
            self._known[key] = _anew(error)
            raise


def _anew(error: BudgetError) -> BudgetError:
    """The same without the frames that it passed through: they hold what was at work there."""
    return error.saying(error.message)
