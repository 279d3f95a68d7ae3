"""`Courses`: of which programs all that is saved has so much room that their next calls need not be noted."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tapestream.costs import Budget
from tapestream.errors import BudgetError
from tapestream.executor.program.noting.along import Along
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.executor.program.record.course import Course, course_of
from tapestream.frontends.program.given import remember
from tapestream.frontends.program.plans import Prepared
from tapestream.frontends.program.report import Report
from tapestream.frontends.program.sizes import Sizes
from tapestream.runner.modes import saving_entered
from tapestream.units import format_nbytes

_ROOM = 1.5
"""Times what plain autograd holds. A call that turns out otherwise at its very end has a third of the budget left for
what follows, and about what this whole program would need at least."""


@dataclass(frozen=True, slots=True)
class Known:
    """A course with what its calls report, and the least budget to go along it; ``shape``: that of its record."""

    course: Course
    report: Report
    room_nbytes: int
    shape: Any


class Courses:
    """By kind of arguments, those of the last call."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def learn(
        self, key: Any, recorder: Recorder, prepared: Prepared, shape: Any, report: Report, sizes: Callable[[], Sizes]
    ) -> None:
        """A call has been noted as a whole, and its record has this ``shape`` and these ``sizes``."""
        known = self._known.pop(key, None)
        if prepared.plan is None or prepared.shape != shape or not prepared.keeps_all:
            return
        if recorder.exposed or recorder.contexts.nbytes:
            return
        if known is None or known.shape != shape:
            course = course_of(recorder.record)
            if course is None:
                return
            held = max(course.held_nbytes)
            room = max(int(_ROOM * max(prepared.plan.peak_nbytes, held)), held + _least(sizes()))
            known = Known(course, replace(report, planned=True), room, shape)
        remember(self._known, key, known)

    def of(self, key: Any, room: Budget) -> Known | None:
        """What the next call may go along, within ``room``."""
        known, limit = self._known.get(key), room.device_nbytes
        if known is None or (limit is not None and known.room_nbytes > limit) or saving_entered():
            return None
        remember(self._known, key, known)
        return known

    def forget(self, key: Any) -> None:
        """A call has turned out otherwise."""
        self._known.pop(key, None)


def _least(sizes: Sizes) -> int:
    """Bytes with which one like it can be reversed, operation by operation: a few states beside what one takes."""
    return int(4 * sizes.alive.max() + max(sizes.running.max(), sizes.reversing.max()))


@contextlib.contextmanager
def beside_beginning(departed: Along | None) -> Iterator[None]:
    """A BudgetError of what is inside becomes one of the whole call, the beginning of which was not noted."""
    try:
        yield
    except BudgetError as error:
        if departed is None or error.least_nbytes is None:
            raise
        least, held = error.least_nbytes + departed.held_nbytes, format_nbytes(departed.held_nbytes)
        raise BudgetError(
            f"Program: this call began like the last one, which kept everything, and kept {held} before it differed; "
            f"the least found to work beside that is {format_nbytes(least)} ({least} bytes) in all. Call it again, "
            "which will drop what it must from its beginning on, or allow that much",
            least_nbytes=least,
        ) from None
