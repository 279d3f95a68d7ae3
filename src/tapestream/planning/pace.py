"""`Pace`: how many samples or tokens a second a plan gives, for calls of one size."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tapestream.units import format_seconds

Unit: TypeAlias = Literal["tokens", "samples"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast calls of one size are, as simulated. ``print(pace)`` shows it.

    ``size``: of the batch, such as (4, 512) tokens or (8,) samples. ``seconds``: of the step, in which the call's
    forward and backward are, and the update if tapestream makes it.
    """

    size: tuple[int, ...]
    unit: Unit
    seconds: float

    @property
    def per_second(self) -> float:
        """Tokens or samples per second."""
        return math.prod(self.size) / self.seconds if self.seconds else math.inf

    def __str__(self) -> str:
        size = " x ".join(map(str, self.size))
        return f"{self.per_second:,.0f} {self.unit}/s with {size} {self.unit} in {format_seconds(self.seconds)}"
