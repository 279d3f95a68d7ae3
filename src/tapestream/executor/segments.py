"""What the engine asks of those that run stages, and of those that own the values of a schedule."""

from typing import Any, Protocol

import torch

from tapestream.ir.actions import Tier, Value
from tapestream.runner.state import State

Sums = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Segments(Protocol):
    """What runs the stages of one call: one object for all of them. States, tapes and cotangents are what it makes
    them; the engine only holds them.

    The live state is given as the only one of a list, so that whoever takes it out is the only one that holds it.
    """

    def forward(self, live: list[Any], start: int, stop: int) -> Any:
        """State ``stop`` from state ``start``, keeping nothing."""

    def record(self, live: list[Any], stage: int, *, output_needed: bool) -> tuple[Any, Any]:
        """State ``stage + 1`` (None if nobody needs it) and the tape of the stage."""

    def backward(self, tape: Any, stage: int, cotangent: Any) -> Any:
        """The cotangent of state ``stage``. The tape is consumed."""

    def keep(self, state: Any, stage: int) -> Any:
        """A restart checkpoint of state ``stage``."""

    def restore(self, kept: Any, stage: int, *, last: bool) -> Any:
        """The live state of a restart checkpoint; ``last``: it is used for the last time."""


class Mover(Protocol):
    """Moves values between tiers, by Offload and Prefetch (`start`), Wait and Free."""

    def start(self, value: Value, source: Tier, target: Tier) -> None: ...
    def wait(self, value: Value, tier: Tier) -> None: ...
    def free(self, value: Value, tier: Tier) -> None: ...


class StageMover(Mover, Protocol):
    """Moves what belongs to stages."""

    def holds(self, value: Value) -> bool:
        """Whether its copy on the device is no longer the engine's to drop: there are others, or it is to stay."""


class Inside(Protocol):
    """Keeps what runs make inside, so that their recomputes need not."""

    def keep_inside(self, stage: int) -> None:
        """The next run of the stage keeps it."""

    def free_inside(self, stage: int) -> None:
        """It is not needed any more."""


class Between(Protocol):
    """What runs between stages, where that is no stage: the caller's own code at first, this in recomputes. Stage ``k``
    then runs on a state of its own, which is made of state k, and state k+1 of what the stage makes."""

    def come_in(self, k: int, state: State) -> State: ...
    def behind(self, k: int, chain: State, own: State) -> "Onward | None": ...  # ``chain``: state k; ``own``: its own


class Onward(Protocol):
    """What runs again behind a stage. ``saves``: it has dropped saved tensors, which ``saving`` makes again."""

    @property
    def saves(self) -> bool: ...
    def __call__(self, made: State, *, saving: bool) -> State: ...


class Blocks(Mover, Protocol):
    """What moves, lends and updates parameter blocks (None for programs whose parameters are the user's own)."""

    @property
    def divided(self) -> bool: ...  # whether other ranks have parts of them
    def update(self, block: int, part: int, tier: Tier) -> None: ...
    def has_gradient(self, block: int) -> bool: ...
    def compute_begins(self, stage: int, *, backward: bool = False) -> None: ...
    def compute_ended(self, stage: int) -> None: ...
    def forward_ended(self) -> None: ...
    def backward_ended(self, stage: int, sums: Sums) -> None: ...
