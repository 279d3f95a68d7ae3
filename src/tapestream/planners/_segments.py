"""Segments reversed by binomial checkpointing on the device."""

from dataclasses import dataclass, field

from tapestream.costs import StageCost
from tapestream.ir import Node
from tapestream.planners._recurrences import (
    Part,
    Twins,
    binomial_cut,
    least_forwards,
    reversal,
    sweep_and_back,
)


@dataclass(frozen=True, slots=True)
class Segments:
    """Binomial checkpointing with ``slots`` restart checkpoints on equal stages of ``cost``."""

    cost: StageCost
    slots: int
    parts: dict[Part, Twins] = field(default_factory=dict)

    @property
    def forward(self) -> float:
        """Seconds of one forward."""
        return self.cost.forward_seconds

    def seconds(self, length: int) -> float:
        """Seconds of recording and reversing ``length`` stages, their first state being live."""
        each = self.cost.recorded_seconds + self.cost.backward_seconds
        return length * each + least_forwards(length, self.slots) * self.forward

    def live(self, length: int) -> Node:
        """The actions of `seconds`."""
        return reversal(Part(length, self.slots), binomial_cut, self.parts).live

    def last(self, length: int) -> tuple[Node, ...]:
        """The same for the last stages of the chain, through the turn."""
        return sweep_and_back(Part(length, self.slots), binomial_cut, self.parts)

    def kept(self, length: int) -> Node:
        """As `live`, the first state being kept already; it is freed."""
        return reversal(Part(length, self.slots), binomial_cut, self.parts).kept
