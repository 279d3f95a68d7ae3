"""`WholeStep`: what one training step takes with all its chains, and what runs beside them."""

from collections.abc import Mapping
from dataclasses import dataclass

from tapestream.ir.actions import Tier
from tapestream.units import format_nbytes, format_seconds


@dataclass(frozen=True, slots=True)
class WholeStep:
    """As simulated. ``seconds``: of the step, of which computing waits ``waiting_seconds`` for copies; ``overhead``:
    these seconds over those with everything stored. ``peak_nbytes``: most bytes held in each tier; ``moved_nbytes``:
    across all links; ``forwards``: runs of blocks, recorded ones included. ``print(step)`` shows it."""

    seconds: float
    waiting_seconds: float
    overhead: float
    forwards: int
    moved_nbytes: int
    peak_nbytes: Mapping[Tier, int]

    def __str__(self) -> str:
        held = ", ".join(f"{format_nbytes(n)} {tier.name}" for tier, n in self.peak_nbytes.items() if n)
        waiting = f", {format_seconds(self.waiting_seconds)} of it waiting for copies" if self.waiting_seconds else ""
        return f"{format_seconds(self.seconds)}, overhead {self.overhead:.2f}{waiting}; {held}"
