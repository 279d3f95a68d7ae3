"""`Terms`: on what terms a step is planned, whether its model exists or is only outlined."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from torch import nn

from tapestream.costs import Budget, Machine
from tapestream.ir.actions import Value
from tapestream.ir.homes import HomeLike
from tapestream.planning.plan import Plan
from tapestream.planning.where import Where

Update: TypeAlias = Literal["step", "backward"] | None
"""When blocks are updated; None: no optimizer was made."""


class Positioned(Protocol):
    """A segment: modules called one after the other, by their positions among `Terms.modules`."""

    @property
    def positions(self) -> Sequence[int]:
        """In the order of the calls."""


@dataclass(frozen=True, slots=True)
class Terms:
    """``modules``: the repeated blocks, then, from position ``wide`` on, the wide modules. ``budget``: of the tiers
    below the device. ``machine`` is asked when speeds are needed. ``given``: the user's own plan.
    ``on_disk``: block values that live there because the host has no room, None where plans decide. ``where``: blocks
    are updated; ``on_device``: those that are updated there although ``where`` is "mixed", None where plans decide.
    """

    modules: Sequence[nn.Module]
    wide: int
    budget: Budget
    machine: Callable[[], Machine]
    home: HomeLike
    update: Update
    planner: str = "auto"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    given: Plan | None = None
    on_disk: frozenset[Value] | None = None
    where: Where = "device"
    on_device: frozenset[int] | None = None

    def is_wide(self, segment: Positioned) -> bool:
        """Whether it has no repeated block."""
        return min(segment.positions) >= self.wide
