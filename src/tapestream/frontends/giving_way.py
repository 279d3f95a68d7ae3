"""Calls that wait for their backward give way to one that does not fit beside them.

Most of them wait for nothing: a step that was skipped, a result that a variable still names. So a call that does not
fit beside them, but would alone, takes their room. If a backward needs one of them after all, it raises what the later
call would have raised, before it uses any number of theirs.
"""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from tapestream.errors import BudgetError, TapestreamError

T = TypeVar("T")
Reason = Callable[[], TapestreamError]
"""The error of a backward that needs a call that has given way. Made anew each time, since an error that was raised
holds all that was at work, and with it the call."""


class GivesWay(Protocol):
    """A call whose backward has not begun."""

    def give_way(self, reason: Reason) -> None:
        """Drop what backward would need."""


class Awaiting:
    """Those of one chain, loop or streamed model, the oldest first."""

    def __init__(self) -> None:
        self._calls: weakref.WeakValueDictionary[int, GivesWay] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[type["Awaiting"], tuple[()]]:
        """A copy awaits nothing."""
        return Awaiting, ()

    def begins(self, call: GivesWay) -> None:
        """``call`` begins to wait."""
        self._calls[id(call)] = call

    def ends(self, call: GivesWay) -> None:
        """Its backward begins, or nobody can ask for it any more."""
        self._calls.pop(id(call), None)

    def all(self) -> list[GivesWay]:
        """They, the oldest first."""
        return list(self._calls.values())

    def planned(
        self, beside: Callable[[], T], alone: Callable[[], T], gave: Callable[[Reason], None] = lambda reason: None
    ) -> T:
        """What ``beside`` gives, a plan beside those that wait. Where that raises BudgetError, as many of them give way
        as need be, and ``gave`` hears of it. Raises it where not even ``alone`` gives a plan, which is one as if none
        of them waited."""
        try:
            return beside()
        except BudgetError as error:
            if not self._calls:
                raise
            try:
                found = alone()
            except BudgetError:
                raise error from None
            reason = partial(gave_way, error.message, error.least_nbytes, error.stage)
        gave(reason)
        for call in self.all():
            call.give_way(reason)
            with contextlib.suppress(BudgetError):
                return beside()
        return found


def gave_way(said: str, least_nbytes: int | None, stage: int | None) -> BudgetError:
    """To a later one, of which that was ``said``."""
    said = f"this backward needs a call that gave way to a later one, which did not fit beside it: {said}"
    return BudgetError(said, least_nbytes=least_nbytes, stage=stage)
