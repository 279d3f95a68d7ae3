"""Every exception that tapestream raises on purpose.

TapestreamError
├── BudgetError          the budget cannot be met (also a ValueError)
├── InputError           an argument, knob, file or model cannot be used as given (also a ValueError)
├── ScheduleError        a schedule breaks a rule of the instruction set (also a ValueError)
├── GradientError        going on would give a wrong gradient (also a RuntimeError)
└── StorageError         a folder, file or memory tier failed (also an OSError)
"""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self


class TapestreamError(Exception):
    """Base class: ``except tapestream.TapestreamError`` catches everything below."""

    def to_keep(self) -> Self:
        """This error without the frames that it, and the errors that caused it, passed through. Frames hold what their
        functions hold, such as the tensors of a call that is over.
        """
        self.__context__ = self.__cause__ = None
        return self.with_traceback(None)


class Allowance(NamedTuple):
    """A budget that works. ``name``: "least", "knee" (the smallest found at most 1.5 times as slow as plain PyTorch) or
    "all" (the smallest found that is as fast as any). ``nbytes``: on the device; ``seconds``: of a step, as planned;
    ``times_plain``: these, as a multiple of plain PyTorch's; ``fills``: what the device holds at the peak, the most
    first, by names for people, with its bytes (empty where it is not known)."""

    name: str
    nbytes: int
    seconds: float
    times_plain: float
    fills: tuple[tuple[str, int], ...] = ()


class BudgetError(TapestreamError, ValueError):
    """The budget cannot be met.

    ``least_nbytes``: the least device budget in bytes that was found to work (None if unknown). ``stage``: the index of
    the stage that needs it (None if no single stage does). ``split``: a training call of a streamed model was refused
    before it changed anything, and fits if its batch is cut into so many equal parts along dimension 0, the fewest that
    work, each with its backward before the next (None where one sample does not fit, or it is not known). ``offers``:
    finds `budgets`, which takes a few plans: so nobody plans before somebody asks, or reads the error.
    """

    def __init__(
        self,
        message: str,
        *,
        least_nbytes: int | None = None,
        stage: int | None = None,
        split: int | None = None,
        offers: "Callable[[], tuple[Allowance, ...]] | None" = None,
    ) -> None:
        super().__init__(message)
        self.message, self.least_nbytes, self.stage = message, least_nbytes, stage
        self.split, self.offers = split, offers
        self._budgets: tuple[Allowance, ...] | None = None

    @property
    def budgets(self) -> tuple[Allowance, ...]:
        """Budgets that work, the smallest first, each with the time of a step; empty where none was found."""
        if self._budgets is None:
            self._budgets = ()
            if self.offers is not None:
                with suppress(TapestreamError):
                    self._budgets = self.offers()
        return self._budgets

    def saying(self, message: str, *, split: int | None = None) -> "BudgetError":
        """The same in other words, and with its ``split`` once that is known."""
        return BudgetError(
            message, least_nbytes=self.least_nbytes, stage=self.stage, split=split or self.split, offers=self.offers
        )

    def __str__(self) -> str:
        if not self.budgets:
            return self.message
        names = {"least": "the least", "knee": "the knee", "all": "as fast as any"}
        each = (f"{names[one.name]}, {one.nbytes} bytes: {_times(one.times_plain)}" for one in self.budgets)
        return f"{self.message}. Times plain PyTorch's time, as planned: {'; '.join(each)}{self._filled()}"

    def _filled(self) -> str:
        least = self.budgets[0]
        most = ", ".join(f"{nbytes} bytes of {what}" for what, nbytes in least.fills[:_MOST])
        return f". {least.nbytes} bytes are filled by {most}" if most else ""


_MOST = 3  # kinds of values


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


class BudgetExceeded(UserWarning):
    """A call has held more than its budget: said once for each plan, in the call in which it was found."""


class InputError(TapestreamError, ValueError):
    """An argument, knob, file or model cannot be used as given."""


class ScheduleError(TapestreamError, ValueError):
    """A schedule breaks a rule of the instruction set. The message shows the surrounding actions.

    ``position``: the index of the offending action in the flat schedule (None if unknown).
    """

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


class GradientError(TapestreamError, RuntimeError):
    """Going on would give a wrong gradient, so tapestream stops instead."""


class StorageError(TapestreamError, OSError):
    """A folder, file or memory tier failed; what was stored before is intact. ``errno`` is the system's, or None."""

    def __str__(self) -> str:
        """The message alone, without the number that the system's own errors put before it."""
        return self.strerror or super().__str__()
