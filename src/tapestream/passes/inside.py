"""What runs keep of their inside, where bytes are left: recomputes need not make it again.

Some of what a stage computes takes long for its bytes: attention over long sequences takes more seconds for each byte
of its result than anything else in a block. (The idea is that of selective activation checkpointing, Korthikanti et al.
2022, who recompute attention for its bytes; kernels that never make its square matrix have turned it around.)
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tapestream.costs import Machine, Profile
from tapestream.ir import Action, Forward, KeepInside, Record, Schedule
from tapestream.passes.stays import cut_forwards
from tapestream.simulate import device_nbytes


def keep_inside(schedule: Schedule, profile: Profile, machine: Machine | None, limit: int) -> Schedule:
    """``schedule``, in which stages keep what they make inside from their last Forward to their Record where that is
    within ``limit`` bytes of the device; the most seconds for each byte first. The same object where nothing is kept.
    """
    stages = profile.stages
    cut = cut_forwards(schedule, lambda k: bool(stages[k].inside_seconds or stages[k - 1].inside_seconds))
    actions = list(cut)
    found = {k: span for k, span in _spans(actions).items() if stages[k].inside_seconds}
    if not found:
        return schedule
    held = np.array(device_nbytes(Schedule.of(actions, schedule.stages, resident=schedule.resident), profile, machine))
    kept: set[int] = set()
    for k in sorted(found, key=lambda k: (-_worth(profile, k), found[k][1] - found[k][0])):
        start, stop = found[k]
        nbytes = stages[k].inside_nbytes
        if int(held[start:stop].max()) + nbytes <= limit:
            held[start:stop] += nbytes
            kept.add(start)
    if not kept:
        return schedule
    return Schedule.of(_with(actions, kept), schedule.stages, resident=schedule.resident, planner=schedule.planner)


def _worth(profile: Profile, k: int) -> float:
    cost = profile.stages[k]
    return cost.inside_seconds / max(1, cost.inside_nbytes)


def _spans(actions: Sequence[Action]) -> dict[int, tuple[int, int]]:
    """By stage: the position of its last Forward by itself before its only Record, and that of the Record."""
    last: dict[int, int] = {}
    found: dict[int, tuple[int, int]] = {}
    for position, action in enumerate(actions):
        match action:
            case Forward(start, stop) if stop == start + 1:
                last[start] = position
            case Record(k) if k in last:
                found[k] = last.pop(k), position
            case _:
                pass
    return found


def _with(actions: Sequence[Action], kept: set[int]) -> Iterator[Action]:
    """The actions, with a KeepInside before each Forward at a position in ``kept``; others are put together again."""
    run: Forward | None = None
    for position, action in enumerate(actions):
        if run is not None and isinstance(action, Forward) and position not in kept:
            run = Forward(run.start, action.stop)
            continue
        if run is not None:
            yield run
            run = None
        if not isinstance(action, Forward):
            yield action
        elif position in kept:
            yield from (KeepInside(action.start), action)
        else:
            run = action
    if run is not None:
        yield run
