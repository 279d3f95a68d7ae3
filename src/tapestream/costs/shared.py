"""Storages that states and saved tensors have in common, and what stages cost who counts each value by itself."""

from dataclasses import dataclass

from tapestream.costs.checks import whole
from tapestream.costs.stage import StageCost
from tapestream.errors import InputError


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """``nbytes`` that states ``first`` .. ``last`` and the saved tensors of the stages ``tapes`` have in common: what a
    state or saved tensors take, as the profile says it, has them each time. Stage ``first`` - 1 makes them, if any."""

    first: int
    last: int
    nbytes: int
    tapes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole("SharedStorage", "first", self.first)
        whole("SharedStorage", "last", self.last, self.first)
        whole("SharedStorage", "nbytes", self.nbytes)
        object.__setattr__(self, "tapes", tuple(self.tapes))  # from a file it is a list
        for stage in self.tapes:
            whole("SharedStorage", "tapes", stage, self.first - 1)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ``storages`` that several values of a chain share; ``apart``: what its stages cost where each value counts by
    itself, for planners that add up bytes. Then transient bytes are fewer, as parts of them are in the values."""

    storages: tuple[SharedStorage, ...]
    apart: tuple[StageCost, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "storages", tuple(self.storages))
        object.__setattr__(self, "apart", tuple(self.apart))
        for shared in self.storages:
            if max(shared.last - 1, *shared.tapes, 0) >= len(self.apart):
                raise InputError(f"Sharing: {shared} is beyond the last of {len(self.apart)} stages")
