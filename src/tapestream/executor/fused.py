"""Which stages a schedule never parts: what it does with one of them, it does with all, one right after the other."""

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.capture.buffers import held
from tapestream.ir.actions import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Prefetch,
    Record,
    Restore,
    Wait,
    renumbered,
)
from tapestream.ir.schedule import Schedule
from tapestream.runner.depth import SHALLOW
from tapestream.runner.fused import Fused, fused_traits
from tapestream.runner.stage import Stage, Traits

_MOST_ACTIONS = 100_000  # of a schedule that is walked, as for `run_once`
_MOST_NODES = SHALLOW // 2
_LITTLE_NBYTES = 2**16
"""Of buffers that a stage writes: recomputes hold copies of those of all that is run as one."""


class Shorter(NamedTuple):
    """A schedule, its stages and their traits."""

    schedule: Schedule
    stages: list[Stage]
    traits: list[Traits]


def fused(
    schedule: Schedule, stages: Sequence[Stage], traits: Sequence[Traits], reading_input: Container[int]
) -> Shorter:
    """The same with stages that ``schedule`` never parts as one. ``reading_input``: see `fused_traits`.

    The bytes are the same at every moment: each state inside is dropped when the next one is made, and a graph frees
    what it saved, and the cotangent that has entered it (see `Entry`), as it is differentiated.
    """
    borders = _borders(schedule, traits)
    if len(borders) == len(stages) + 1:
        return Shorter(schedule, [*stages], [*traits])
    place = {border: k for k, border in enumerate(borders)}
    # Of the records of stages that are run as one the first's stands for all, and so does its backward.
    standing = (a for a in schedule if not isinstance(a, Record | Backward) or a.stage in place)
    found = Shorter(Schedule.of((renumbered(a, place) for a in standing), len(borders) - 1,
                                resident=schedule.resident, planner=schedule.planner), [], [])  # fmt: skip
    for k, (first, end) in enumerate(pairwise(borders)):
        if end == first + 1:
            found.stages.append(stages[first])
            found.traits.append(traits[first])
        else:
            found.stages.append(Fused(k, stages[first:end]))
            found.traits.append(fused_traits(traits[first:end], reads_input=first in reading_input))
    return found


def _borders(schedule: Schedule, traits: Sequence[Traits]) -> list[int]:
    """Where one stage must end and another begin."""
    n = len(traits)
    if schedule.size > _MOST_ACTIONS:
        return [*range(n + 1)]
    found = {0, n}
    for k, one in enumerate(traits):
        found |= {k} if one.mutates else set()  # it gets a copy of its input
        found |= {k, k + 1} if _is_alone(one) else set()
    before: Action | None = None
    for action in schedule:
        _add_borders(found, before, action)
        before = action
    _add_borders(found, before, None)
    return _shallow(sorted(found), traits)


def _is_alone(stage: Traits) -> bool:
    """It differentiates inside, and keeps its own tape until it ends; its graph ends at leaves that nobody knows; or it
    writes large buffers."""
    buffers = (held(slot) for slot in stage.buffers)
    nbytes = sum(tensor_nbytes(buffer) for buffer in buffers if isinstance(buffer, torch.Tensor))
    return stage.calls_autograd or stage.makes_leaves or nbytes > _LITTLE_NBYTES


def _shallow(borders: Sequence[int], traits: Sequence[Traits]) -> list[int]:
    """With some more, so that no graph is too deep to be looked at."""
    found, nodes = [0], 0
    for border in borders[1:]:
        for k in range(found[-1], border):
            if nodes and nodes + traits[k].nodes > _MOST_NODES:
                found.append(k)
                nodes = 0
            nodes += traits[k].nodes
        found.append(border)
        nodes = 0
    return found


def _add_borders(found: set[int], before: Action | None, action: Action | None) -> None:
    """What ``action``, and that it comes after ``before``, says of borders."""
    in_turn = False
    match before, action:
        case (Record(a), Record(b)) | (Backward(b), Backward(a)):
            in_turn = b == a + 1
    if not in_turn:
        for one, at in ((before, 1), (action, 0)):
            match one:
                case Record(k):
                    found.add(k + at)
                case Backward(k):
                    found.add(k + 1 - at)
                case _:
                    pass
    match action:
        case Forward(start, stop):
            found |= {start, stop}
        case Keep(k) | Restore(k):
            found.add(k)
        case Offload(value) | Prefetch(value) | Wait(value) | Free(value) if value.kind is Kind.STATE:
            found.add(value.index)
        case Offload(value) | Prefetch(value) | Wait(value) | Free(value) if value.kind.by_stage:
            found |= {value.index, value.index + 1}
        case _:
            pass
