"""What calls hold, against their budget."""

import warnings

from tapestream.errors import BudgetError, BudgetExceeded
from tapestream.units import format_nbytes

_SLACK, _SLACK_NBYTES = 1.02, 16 * 1024


def limit_of(budget_nbytes: int) -> float:
    """So many bytes may be held before a budget counts as exceeded: allocators round, and meters see tiny tensors."""
    return _SLACK * budget_nbytes + _SLACK_NBYTES


class Exceeded:
    """What was said of the calls of one front end, ``what``. ``last``: the last of it, for `ts.report`."""

    def __init__(self, what: str) -> None:
        self._what, self._said = what, set[str]()
        self.last: str | None = None

    def say(self, held_nbytes: int, budget_nbytes: int, holder: str, *, strict: bool = False) -> None:
        """A call holds more than its budget; who holds it is said once: the warning BudgetExceeded. With ``strict``
        BudgetError is raised."""
        held, asked = format_nbytes(held_nbytes), format_nbytes(budget_nbytes)
        self.last = (
            f"{self._what}: a call holds {held} ({held_nbytes} bytes) at its peak, but a budget of {asked} was asked "
            f"for: {holder}"
        )
        if strict:
            raise BudgetError(self.last, least_nbytes=held_nbytes)
        if holder not in self._said:
            self._said.add(holder)
            warnings.warn(self.last, BudgetExceeded, stacklevel=3)
