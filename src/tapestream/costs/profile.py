"""`Profile`: everything that planners and the simulator know about a program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from tapestream.costs.stage import BlockCost, Carried, StageCost
from tapestream.errors import InputError


@dataclass(frozen=True, slots=True)
class UniformStages(Sequence[StageCost]):
    """``count`` times the same stage, in constant memory."""

    cost: StageCost
    count: int  # type: ignore[assignment]  # Sequence.count, which nobody needs here

    def __len__(self) -> int:
        return self.count

    @overload
    def __getitem__(self, index: int) -> StageCost: ...
    @overload
    def __getitem__(self, index: slice) -> "UniformStages": ...
    def __getitem__(self, index: int | slice) -> "StageCost | UniformStages":
        if isinstance(index, slice):
            return UniformStages(self.cost, len(range(*index.indices(self.count))))
        if not -self.count <= index < self.count:
            raise IndexError(index)
        return self.cost


@dataclass(frozen=True, slots=True)
class Profile:
    """A chain as planners see it.

    ``initial_nbytes``: bytes of state 0 (0 where the caller owns it). ``blocks``: parameter blocks;
    ``stages[k].block`` points into it. ``carried``: storages that several states share. ``outside_nbytes``: device
    bytes held all the time outside the chain (parameters, gradients beside the blocks). ``turn_nbytes`` /
    ``turn_seconds``: peak bytes on top and seconds of what runs between the last forward and the first backward
    (head, loss).
    """

    stages: Sequence[StageCost]
    initial_nbytes: int
    blocks: tuple[BlockCost, ...] = ()
    carried: tuple[Carried, ...] = ()
    outside_nbytes: int = 0
    turn_nbytes: int = 0
    turn_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("Profile: at least one stage is needed")
        if not isinstance(self.stages, (tuple, UniformStages)):
            object.__setattr__(self, "stages", tuple(self.stages))
        distinct = (self.stages.cost,) if isinstance(self.stages, UniformStages) else self.stages
        for cost in distinct:
            if cost.block is not None and not 0 <= cost.block < len(self.blocks):
                raise InputError(f"Profile: a stage uses block {cost.block}, but there are {len(self.blocks)} blocks")

    @classmethod
    def uniform(
        cls,
        n: int,
        *,
        forward_seconds: float = 1.0,
        backward_seconds: float = 1.0,
        state_nbytes: int = 1,
        saved_nbytes: int = 1,
    ) -> "Profile":
        """``n`` equal stages without parameters; constant memory whatever ``n`` is."""
        cost = StageCost(forward_seconds, backward_seconds, state_nbytes, saved_nbytes)
        return cls(UniformStages(cost, n), state_nbytes)

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def is_uniform(self) -> bool:
        """True when every stage costs the same and shift does not matter (initial state included)."""
        return (
            isinstance(self.stages, UniformStages)
            and not self.carried
            and self.initial_nbytes == self.stages.cost.output_nbytes
        )

    def state_nbytes(self, k: int) -> int:
        """Bytes of state k alone, carried storages excluded."""
        return self.initial_nbytes if k == 0 else self.stages[k - 1].output_nbytes

    def full_state_nbytes(self, k: int) -> int:
        """Bytes of state k, carried storages included: what keeping it alone costs."""
        shared = sum(c.nbytes for c in self.carried if c.first <= k <= c.last)
        return self.state_nbytes(k) + shared

    def cotangent_nbytes(self, k: int) -> int:
        """Bytes of the cotangent of state k."""
        return self.initial_nbytes if k == 0 else self.stages[k - 1].cotangent_bytes

    def without_blocks(self) -> "Profile":
        """The same chain with parameters costing nothing: what planners of recomputation alone look at."""
        if isinstance(self.stages, UniformStages):
            stages: Sequence[StageCost] = UniformStages(replace(self.stages.cost, block=None), self.stages.count)
        else:
            stages = tuple(replace(cost, block=None) for cost in self.stages)
        return replace(self, stages=stages, blocks=())
