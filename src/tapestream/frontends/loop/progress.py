"""``progress=``: steps done and time left, over both sweeps and all recomputed steps."""

import sys
import time
from collections.abc import Callable

from tapestream.errors import InputError

Report = Callable[[int, int | None, float | None], object]
"""Called with steps done, steps in all (None: not known yet) and seconds left (None: not known yet)."""

_EVERY_SECONDS = 0.2


class Progress:
    """Counts steps of one call and tells ``report`` about five times a second, and at the end."""

    def __init__(self, report: Report, of: int | None) -> None:
        self._report, self.of = report, of
        self._done = self._said = 0
        self._began = self._told = time.perf_counter()

    def __call__(self, steps: int) -> None:
        """``steps`` more are done."""
        self._done += steps
        now = time.perf_counter()
        if now - self._told >= _EVERY_SECONDS:
            self._told = now
            self._tell(now)

    def end(self) -> None:
        """All steps are done."""
        if self._said != self._done or self.of != self._done:
            self.of = self._done
            self._tell(time.perf_counter())

    def _tell(self, now: float) -> None:
        self._said = self._done
        left = None if self.of is None else (self.of - self._done) * (now - self._began) / max(1, self._done)
        self._report(self._done, self.of, left if left is None else max(0.0, left))


def progress_of(asked: object) -> Report | None:
    """What ``progress=`` means: True is a line on standard error."""
    if asked is None or asked is False:
        return None
    if asked is True:
        return _line
    if callable(asked):
        return asked
    raise InputError(f"Loop: progress= is True or a function of (done, of, seconds_left), not {asked!r}")


def _line(done: int, of: int | None, seconds_left: float | None) -> None:
    rest = "" if of is None else f" of {of}"
    left = "" if seconds_left is None else f", {seconds_left:.1f} s left"
    print(f"\r{done}{rest} steps{left}   ", end="\n" if done == of else "", file=sys.stderr, flush=True)
