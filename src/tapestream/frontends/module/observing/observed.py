"""What one observed call of a streamed model gave: its blocks in segments, each with costs and traits."""

from dataclasses import dataclass, field

from tapestream.costs import StageCost
from tapestream.frontends.module.observing.returned import Turn
from tapestream.planning.travellers import Travellers
from tapestream.runner.stage import Stage, Traits


@dataclass(slots=True)
class Segment:
    """Blocks called one after the other, each on what the one before returned and nothing else with a gradient.

    ``clones``: per block, whether it writes into tensors inside objects among its arguments (a cache of fixed size);
    ``passes``: whether tensors with gradients come or go in them.
    ``cuts``: per block, which values of the work between the block before and this one are the state of the chain, None
    where no work leads from one to the other (see `Border`);
    ``parted``: what separates it from the segment before, None for the first;
    ``reused``: something that is no block after it uses what some block of the call was given.
    """

    positions: list[int] = field(default_factory=list)
    costs: list[StageCost] = field(default_factory=list)
    traits: list[Traits] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    clones: list[bool] = field(default_factory=list)
    passes: list[bool] = field(default_factory=list)
    cuts: list[tuple[int, ...] | None] = field(default_factory=list)
    parted: str | None = None
    reused: bool = False
    initial_nbytes: int = 0
    travellers: Travellers | None = None


@dataclass(slots=True)
class Observed:
    """What one observed call gave.

    ``before_nbytes``: tape of what runs before blocks (embeddings), what is used by blocks and again later, and what
    blocks have left in objects (a cache), ``left_nbytes``; ``turn``: what runs after the last of them.
    ``writes_outside``: whether what runs outside blocks wrote buffers. ``used_directly``: parameter blocks of which
    parameters were used outside of any block's call.
    ``used_first``: ids of the leaves that what runs before the first block uses, and nothing later does: their
    gradients are made when the backward of all blocks has ended. ``again``: what blocks pass on in objects is known
    only now, so that the call must be observed again; ``written``: positions of blocks whose chain's state is written
    into behind them, so that no work may link them to the block before.
    """

    segments: list[Segment]
    before_nbytes: int
    left_nbytes: int
    turn: Turn
    writes_outside: bool
    used_directly: frozenset[int]
    used_first: frozenset[int]
    again: bool
    written: frozenset[int] = frozenset()
