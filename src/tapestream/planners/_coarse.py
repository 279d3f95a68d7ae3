"""A long chain as a short one: runs of stages as single stages, and a schedule of those as one of the chain."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from tapestream.costs import Profile, StageCost
from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Offload,
    Prefetch,
    Record,
    Repeat,
    Restore,
    Series,
    Value,
    Wait,
)
from tapestream.planners._recurrences import recorded, reversed_stages
from tapestream.planners._units import Run, even_points, unit_of


class Short(NamedTuple):
    """A chain of few stages that stand for runs of those of a long one, ``points`` being where these begin and end.

    ``profile`` counts never less bytes than the runs recorded, passed forward and reversed as a whole take; carried
    storages count with each state. ``moving`` counts as saved tensors only what can be moved: states inside a run,
    which its tape holds, cannot.
    """

    profile: Profile
    moving: Profile
    points: list[int]


def coarse(profile: Profile, width: int) -> Short:
    """``profile`` in at most ``width`` stages, itself where it has no more."""
    n = len(profile)
    if n <= width:
        return Short(profile, profile, list(range(n + 1)))
    run, always = Run.of(profile)
    points = even_points(run.states, width)
    known: dict[Run, StageCost] = {}
    stages = []
    for start, stop in pairwise(points):
        part = run.cut(start, stop)
        if part not in known:
            known[part] = _stage(part)
        stages.append(known[part])
    short = replace(profile, stages=tuple(stages), initial_nbytes=run.states[0], carried=(), outside_nbytes=always)
    saved = (sum(cost.saved_nbytes for cost in run.costs[a:b]) for a, b in pairwise(points))
    moving = tuple(replace(stage, saved_nbytes=nbytes) for stage, nbytes in zip(stages, saved, strict=True))
    return Short(short, replace(short, stages=moving), points)


def _stage(run: Run) -> StageCost:
    unit = unit_of(run, 0)
    output = run.states[-1]
    saved = unit.saved_nbytes - (output if unit.reads_output else 0)
    held = saved + (output if unit.reads_output else 0) + run.cotangents[0] + run.cotangents[-1] + unit.gradient_nbytes
    return StageCost(
        unit.forward_seconds,
        sum(cost.backward_seconds for cost in run.costs),
        output,
        saved,
        unit.reads_input,
        unit.reads_output,
        max(0, unit.forward_nbytes - output),
        max(0, unit.backward_nbytes - held),
        run.cotangents[-1],
        record_seconds=sum(cost.recorded_seconds for cost in run.costs),
        record_extra_nbytes=max(0, unit.record_nbytes - saved - output),
        gradient_nbytes=unit.gradient_nbytes,
        saved_storages=sum(cost.saved_storages for cost in run.costs),
    )


def expanded(actions: Iterable[Action], points: Sequence[int]) -> Node:
    """A schedule of the short chain as one of the long chain; what is moved of a run moves stage by stage."""
    return Series(tuple(_expanded(action, points) for action in actions))


def _expanded(action: Action, points: Sequence[int]) -> Node:
    match action:
        case Forward(start, stop):
            return Forward(points[start], points[stop])
        case Record(k):
            return recorded(points[k], points[k + 1])
        case Backward(k):
            return reversed_stages(points[k], points[k + 1])
        case Keep(k):
            return Keep(points[k])
        case Restore(k):
            return Restore(points[k])
        case Offload(value, source, target) | Prefetch(value, source, target):
            first, count = _first(value, points)
            return _each(type(action)(first, source, target), count)
        case Wait(value, tier) | Free(value, tier):
            first, count = _first(value, points)
            return _each(type(action)(first, tier), count)
        case _:
            return action


def _first(value: Value, points: Sequence[int]) -> tuple[Value, int]:
    """The first value of the long chain that ``value`` stands for, and how many there are."""
    start = points[value.index]
    return Value(value.kind, start), points[value.index + 1] - start if value.kind is Kind.SAVED else 1


def _each(action: Action, count: int) -> Node:
    return Repeat(action, count, 1) if count > 1 else action
