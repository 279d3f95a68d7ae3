"""What an optimizer needs of a streamed model."""

from typing import Any, Literal, Protocol

from torch import nn

from tapestream.costs import Budget, Profile
from tapestream.executor.blocks import BlockStore, Updater


class Given(Protocol):
    """A plan that the user brought."""

    @property
    def budget(self) -> Budget: ...
    @property
    def profile(self) -> Profile: ...


class Limits(Protocol):
    """Where the blocks live."""

    def limited(self, budget: Budget) -> Budget: ...


class Handle(Protocol):
    """A streamed model. ``optimizer``: the one that it has."""

    model: nn.Module
    store: BlockStore
    budget: Budget
    optimizer: Any

    @property
    def homes(self) -> Limits: ...

    @property
    def given(self) -> Given | None: ...

    update: Literal["step", "backward"] | None

    def check_idle(self, what: str) -> None: ...
    def attach(self, optimizer: Any, updater: Updater) -> None: ...
    def run_step(self, *, anew: bool) -> None: ...
    def replan(self) -> None: ...
