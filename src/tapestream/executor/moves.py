"""What the interpreter asks of those that own the values of a schedule."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tapestream.ir.actions import Tier, Value
from tapestream.runner.guards import Pack, Unpack
from tapestream.runner.runner import Gradients
from tapestream.runner.stage import Stage
from tapestream.runner.state import State

Sums = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Blocks(Protocol):
    """What moves, lends and updates parameter blocks (None for programs whose parameters are the user's own)."""

    @property
    def divided(self) -> bool: ...  # whether other ranks have parts of them
    def start(self, value: Value, source: Tier, target: Tier) -> None: ...
    def wait(self, value: Value, tier: Tier) -> None: ...
    def free(self, value: Value, tier: Tier) -> None: ...
    def update(self, block: int, part: int, tier: Tier) -> None: ...
    def has_gradient(self, block: int) -> bool: ...
    def compute_begins(self, stage: int, *, backward: bool = False) -> None: ...
    def compute_ended(self, stage: int) -> None: ...
    def forward_ended(self) -> None: ...
    def backward_ended(self, stage: int, sums: Sums) -> None: ...


class Runs(Protocol):
    """What runs the stages: see `Runner`, for one batch, and `JointRunner`, for several micro-batches. A tape is what
    it makes of one."""

    stages: Sequence[Stage]
    hooks: Callable[[int], tuple[Pack, Unpack] | None] | None
    inside: dict[int, Any]

    def forward(self, k: int, states: list[State], *, keep_inside: bool = False) -> State: ...
    def record(self, k: int, states: list[State], *, output_needed: bool = True) -> tuple[State | None, Any]: ...
    def backward(
        self, k: int, tape: Any, cotangents: Gradients, sums: Sums, begun: Gradients | None = None
    ) -> tuple[Gradients, list[tuple[torch.Tensor, torch.Tensor]]]: ...
    def forget(self, k: int) -> None: ...
