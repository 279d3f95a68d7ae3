"""`Remedy`: a change with which a step takes less time, tried by the judge."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

from tapestream.units import format_nbytes, format_seconds

_GAIN = 0.99  # of the seconds: less is no remedy


class _Timed(Protocol):
    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=_Timed)


def that_help(tried: Iterable[T], seconds: float) -> list[T]:
    """Those that save more than 1% of ``seconds``, the fastest first."""
    return sorted((one for one in tried if one.seconds < _GAIN * seconds), key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class Remedy:
    """``change``: in words, as one would write it in Python. ``seconds``: of a whole step with it, for the same
    samples, and ``before_seconds`` without (infinite: it does not fit); ``peak_nbytes``: on the device."""

    change: str
    seconds: float
    peak_nbytes: int
    before_seconds: float = inf

    def __str__(self) -> str:
        before = "" if self.before_seconds == inf else f" in place of {format_seconds(self.before_seconds)}"
        return f"{self.change}: {format_seconds(self.seconds)}{before} a step, peak {format_nbytes(self.peak_nbytes)}"
