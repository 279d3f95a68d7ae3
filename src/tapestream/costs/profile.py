"""`Profile`: everything that planners and the simulator know about a program."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from tapestream.costs.checks import duration, whole
from tapestream.costs.stage import BlockCost, Carried, StageCost
from tapestream.errors import InputError
from tapestream.ir.actions import Kind, Tier, Value


@dataclass(frozen=True, slots=True)
class UniformStages(Sequence[StageCost]):
    """``count`` times the same stage, in constant memory."""

    cost: StageCost
    count: int  # type: ignore[assignment]  # Sequence.count, which nobody needs here

    def __post_init__(self) -> None:
        whole("UniformStages", "count", self.count)

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

    ``initial_nbytes``: bytes of state 0 (0 if the caller owns it). ``blocks``: parameter blocks; ``stages[k].block`` is
    an index into it. ``carried``: storages that several states share. ``outside_nbytes``: device bytes held all the
    time outside the chain (parameters, gradients beside the blocks). ``turn_nbytes``, ``turn_seconds``: additional
    bytes at the peak, and seconds, of what runs between the last forward and the first backward (head, loss). ``ends``:
    if several chains meet in that turn (see `join`), the last state of each chain but the last. ``shards``: among so
    many ranks the bytes of parameter blocks are divided: each has a shard of them at home, and whole copies on its
    device while stages run.
    """

    stages: Sequence[StageCost]
    initial_nbytes: int
    blocks: tuple[BlockCost, ...] = ()
    carried: tuple[Carried, ...] = ()
    outside_nbytes: int = 0
    turn_nbytes: int = 0
    turn_seconds: float = 0.0
    ends: tuple[int, ...] = ()
    shards: int = 1
    _holding: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise InputError("Profile: at least one stage is needed")
        for name in ("initial_nbytes", "outside_nbytes", "turn_nbytes"):
            whole("Profile", name, getattr(self, name))
        whole("Profile", "shards", self.shards, 1)
        duration("Profile", "turn_seconds", self.turn_seconds)
        if not isinstance(self.stages, (tuple, UniformStages)):
            object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "ends", tuple(self.ends))  # from a file it is a list
        if any(stop - start < 1 for start, stop in self.spans):
            raise InputError(f"Profile: ends={self.ends} leave a branch without any stage, of {len(self)} stages")
        distinct = (self.stages.cost,) if isinstance(self.stages, UniformStages) else self.stages
        for cost in distinct:
            if not isinstance(cost, StageCost):
                raise InputError(f"Profile: a stage is a StageCost, not {cost!r}")
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
        """``n`` equal stages without parameters. Memory is constant, whatever ``n`` is."""
        cost = StageCost(forward_seconds, backward_seconds, state_nbytes, saved_nbytes)
        return cls(UniformStages(cost, n), state_nbytes)

    @classmethod
    def join(cls, branches: Sequence["Profile"], *, turn_nbytes: int = 0, turn_seconds: float = 0.0) -> "Profile":
        """Several chains, each with an input of its own, whose last states meet in one turn.

        States are numbered branch after branch, and stage k maps state k to state k+1 as ever. After the last state of
        a branch (``ends``) comes the first state of the next; the stage number between the two stands for no stage. One
        branch alone is a chain. Raises InputError for no branch, and for branches with parameter blocks, with a turn of
        their own, or joined already.
        """
        if not branches:
            raise InputError("Profile.join: at least one branch is needed")
        stages: list[StageCost] = []
        ends: list[int] = []
        carried: list[Carried] = []
        for number, branch in enumerate(branches):
            if branch.blocks or branch.ends or branch.turn_nbytes or branch.turn_seconds:
                raise InputError(
                    f"Profile.join: branch {number} must be a chain without parameter blocks (without_blocks()) and "
                    "without a turn (give turn_nbytes= and turn_seconds= to join)"
                )
            if number:
                ends.append(len(stages))
                stages.append(StageCost(0.0, 0.0, branch.initial_nbytes, 0, reads_input=False))  # no stage: see above
            carried += (Carried(c.first + len(stages), c.last + len(stages), c.nbytes) for c in branch.carried)
            stages += branch.stages
        return cls(
            branches[0].stages if not ends else tuple(stages),
            branches[0].initial_nbytes,
            carried=tuple(carried),
            outside_nbytes=sum(branch.outside_nbytes for branch in branches),
            turn_nbytes=turn_nbytes,
            turn_seconds=turn_seconds,
            ends=tuple(ends),
        )

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first and last state of each branch. A chain is one branch."""
        return tuple(zip((0, *(end + 1 for end in self.ends)), (*self.ends, len(self)), strict=True))

    @property
    def branches(self) -> tuple["Profile", ...]:
        """The chains that meet, without the turn and without ``outside_nbytes``."""
        return tuple(
            Profile(
                self.stages[start:stop],
                self.state_nbytes(start),
                carried=tuple(
                    Carried(c.first - start, c.last - start, c.nbytes) for c in self.carried if start <= c.first <= stop
                ),
            )
            for start, stop in self.spans
        )

    def __len__(self) -> int:
        """How many stages are numbered."""
        return len(self.stages)

    @property
    def runs(self) -> int:
        """How many stages there are to run. If branches meet, more are numbered."""
        return len(self.stages) - len(self.ends)

    @property
    def is_uniform(self) -> bool:
        """True if every stage costs the same and a shift does not matter (initial state included)."""
        return (
            isinstance(self.stages, UniformStages)
            and not self.carried
            and self.initial_nbytes == self.stages.cost.output_nbytes
        )

    @property
    def may_keep_inside(self) -> bool:
        """Whether a run of some stage may keep results that save its recompute time."""
        costs = (self.stages.cost,) if isinstance(self.stages, UniformStages) else self.stages
        return any(cost.inside_seconds for cost in costs)

    @property
    def holding(self) -> tuple[int, ...]:
        """Parameter blocks that have bytes, in order. A module beside a deep chain has one, and a hundred thousand
        places of the others', so they are looked for once."""
        if self._holding is None:
            found = tuple(number for number, block in enumerate(self.blocks) if not block.is_empty)
            object.__setattr__(self, "_holding", found)
            return found
        return self._holding

    def state_nbytes(self, k: int) -> int:
        """Bytes of state k alone, carried storages excluded."""
        return self.initial_nbytes if k == 0 else self.stages[k - 1].output_nbytes

    def full_state_nbytes(self, k: int) -> int:
        """Bytes of state k, carried storages included: what it costs to keep this state alone."""
        shared = sum(c.nbytes for c in self.carried if c.first <= k <= c.last)
        return self.state_nbytes(k) + shared

    def cotangent_nbytes(self, k: int) -> int:
        """Bytes of the cotangent of state k."""
        return self.initial_nbytes if k == 0 else self.stages[k - 1].cotangent_bytes

    def block_nbytes(self, value: Value, tier: Tier) -> int:
        """Bytes of the copy of a parameter block's value in ``tier``: all of them on the device, a shard elsewhere.
        Optimizer state is that of this rank's shard wherever it is."""
        return sharded(self.blocks[value.index].nbytes_of(value.kind, value.part), value.kind, tier, self.shards)

    def without_blocks(self) -> "Profile":
        """The same chain, with parameters that cost nothing: what planners that only recompute look at."""
        if isinstance(self.stages, UniformStages):
            stages: Sequence[StageCost] = UniformStages(replace(self.stages.cost, block=None), self.stages.count)
        else:
            stages = tuple(replace(cost, block=None) for cost in self.stages)
        return replace(self, stages=stages, blocks=(), shards=1)

    def with_gradients_staying(self) -> "Profile":
        """The same, but the gradient of each block stays from the first backward that makes it. For planners of chains
        whose blocks do not move: the more gradients are there, the less room there is.

        If all stages use one block, its gradient is there from the first backward on, and counts nothing here.
        """
        if isinstance(self.stages, UniformStages):
            return self.without_blocks()
        first = {cost.block: k for k, cost in enumerate(self.stages) if cost.block is not None}
        made = {k: self.block_nbytes(Value(Kind.GRADIENT, block), Tier.SHARD) for block, k in first.items()}
        stages = (replace(cost, block=None, gradient_nbytes=cost.gradient_nbytes + made.get(k, 0))
                  for k, cost in enumerate(self.stages))  # fmt: skip
        return replace(self, stages=tuple(stages), blocks=(), shards=1)


SUMMED_AT_ONCE = 2**25
"""Bytes of a gradient that come from all ranks at a time, to be summed. Large enough for the network, small beside a
device."""


def sharded(nbytes: int, kind: Kind, tier: Tier, shards: int) -> int:
    """Bytes of a copy in ``tier`` of a block's ``nbytes``, of which each of ``shards`` ranks has an equal part."""
    if shards == 1 or tier is Tier.DEVICE or kind is Kind.OPTIMIZER_STATE:
        return nbytes
    return -(-nbytes // shards)
