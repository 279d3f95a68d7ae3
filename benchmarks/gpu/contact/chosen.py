"""What every step is told."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Size = TypeVar("_Size")


@dataclass(frozen=True, slots=True)
class Chosen:
    """How to run. ``dry``: on the simulated GPU, in small; the numbers mean nothing. ``ends``: when the step's time is
    up, by `time.monotonic`. ``folder``: where results are. ``command`` starts another process of this step, with a
    ``part`` of the work: which of how many."""

    dry: bool
    ends: float
    folder: Path
    command: tuple[str, ...] = ()
    part: tuple[int, int] | None = None
    device: str = "cuda"

    @property
    def left_seconds(self) -> float:
        """Until the step's time is up."""
        return self.ends - time.monotonic()

    def of_speed(self, verdict: bool) -> bool | None:
        """A verdict on speed, which the simulated GPU cannot give."""
        return None if self.dry else verdict

    def size(self, real: _Size, small: _Size) -> _Size:
        """One of two, by what the run is."""
        return small if self.dry else real


def say(*words: Any) -> None:
    """A line of progress."""
    print(*words, flush=True)
