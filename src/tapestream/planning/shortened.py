"""`Shortened`: a chain of very many parameter blocks as one of few, whose blocks each stand for some that follow each
other, and a schedule of that as one of the whole chain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tapestream.costs import BlockCost, Profile
from tapestream.ir import Action, Free, Offload, Prefetch, Schedule, Update, Value, Wait
from tapestream.ir.schedule import iterate
from tapestream.planners._coarse import coarse, expanded


@dataclass(frozen=True, slots=True)
class Shortened:
    """``profile``: of the short chain; ``points``: where the runs of stages that its stages stand for begin and end.
    ``blocks``: those of the long chain that each of its blocks stands for, which have equally many parts of optimizer
    state: each of its parts stands for one of each of them."""

    profile: Profile
    points: Sequence[int]
    blocks: Sequence[Sequence[int]]

    def lengthened(self, schedule: Schedule, stages: int) -> Schedule:
        """``schedule`` for the long chain: what was done with a block is done with those that it stands for."""
        actions = [one for action in schedule for one in self._each(action)]
        resident = tuple((one, tier) for value, tier in schedule.resident for one in self._values(value))
        return Schedule.of(actions, stages, resident=resident, planner=schedule.planner)

    def _each(self, action: Action) -> Iterator[Action]:
        match action:
            case Update(block, part, tier):
                yield from (Update(one, part, tier) for one in self.blocks[block])
            case Offload(value, source, target) | Prefetch(value, source, target) if not value.kind.by_stage:
                yield from (type(action)(one, source, target) for one in self._values(value))
            case Wait(value, tier) | Free(value, tier) if not value.kind.by_stage:
                yield from (type(action)(one, tier) for one in self._values(value))
            case _:
                yield from iterate(expanded((action,), self.points))

    def _values(self, value: Value) -> Iterator[Value]:
        return (Value(value.kind, block, value.part) for block in self.blocks[value.index])


def shortened(profile: Profile, width: int) -> Shortened | None:
    """``profile`` in at most ``width`` stages; None where stages share blocks or have none, or blocks have more parts
    of optimizer state than others."""
    own = [stage.block for stage in profile.stages]
    used = [block for block in own if block is not None]
    parts = {len(profile.blocks[block].parts) for block in used}
    if len(set(used)) < len(own) or profile.shards > 1 or len(parts) > 1:
        return None
    short = coarse(profile.without_blocks(), width)
    runs = [used[start:stop] for start, stop in pairwise(short.points)]
    stages = tuple(replace(stage, block=number) for number, stage in enumerate(short.profile.stages))
    known: dict[tuple[BlockCost, ...], BlockCost] = {}
    blocks = []
    for run in runs:
        costs = tuple(profile.blocks[block] for block in run)
        if costs not in known:
            known[costs] = _together(costs)
        blocks.append(known[costs])
    return Shortened(replace(short.profile, stages=stages, blocks=tuple(blocks)), short.points, runs)


def _together(costs: Sequence[BlockCost]) -> BlockCost:
    """One block of all these."""
    return BlockCost(
        sum(cost.parameters_nbytes for cost in costs),
        gradient_nbytes=sum(cost.gradient_nbytes for cost in costs),
        optimizer_state_nbytes=sum(cost.optimizer_state_nbytes for cost in costs),
        buffers_nbytes=sum(cost.buffers_nbytes for cost in costs),
        update_seconds=sum(cost.update_seconds for cost in costs),
        update_extra_nbytes=max(cost.update_extra_nbytes for cost in costs),
        state_parts=tuple(map(sum, zip(*(cost.parts for cost in costs), strict=True))),
        host_update_seconds=sum(cost.host_update_seconds or 0.0 for cost in costs),
    )
