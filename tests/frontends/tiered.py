"""Chains over several tiers: given links, a schedule that moves all there is, runs that are counted."""

import contextlib
from collections.abc import Iterator
from typing import Any

from exact import called_once
from models import Case, Stages

from tapestream.costs import Budget, Link, Machine
from tapestream.frontends.chain import Chain
from tapestream.ir import (
    Action,
    Backward,
    Free,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Schedule,
    Tier,
    Value,
    Wait,
)
from tapestream.planning.plan import Plan

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
ENGINES = ("threads", "adversarial")
SLOW = Link(5e8, 1e-4)
DISKS = Machine({(DEVICE, DISK): SLOW, (DISK, DEVICE): SLOW})
HOSTS = Machine({(DEVICE, HOST): SLOW, (HOST, DEVICE): SLOW})


def saved_away(n: int, tier: Tier) -> Schedule:
    """Everything is recorded in the first sweep; the saved tensors of all stages but the last go to ``tier`` and come
    back one stage ahead of their backward."""
    saved = [Value(Kind.SAVED, k) for k in range(n)]
    actions: list[Action] = [Phase(PhaseKind.FORWARD)]
    for k in range(n):
        actions.append(Record(k))
        if k:
            actions += [Wait(saved[k - 1], tier), Free(saved[k - 1], DEVICE)]
        if k < n - 1:
            actions.append(Offload(saved[k], DEVICE, tier))
    actions.append(Phase(PhaseKind.BACKWARD))
    for k in reversed(range(n)):
        if k:
            actions.append(Prefetch(saved[k - 1], tier, DEVICE))
        actions.append(Backward(k))  # drops the copy below, too
        if k:
            actions.append(Wait(saved[k - 1], DEVICE))
    return Schedule.of(actions, n, planner="hand")


def chain_by_hand(case: Case, stages: Stages, schedule: Schedule, **options: Any) -> Chain:
    """A chain of ``stages`` that obeys ``schedule``."""
    stored = called_once(case, case.stages(), planner="store_all").plan
    assert stored is not None
    return Chain(stages, plan=Plan.judged(schedule, stored.profile, Budget(), options.get("machine")), **options)


@contextlib.contextmanager
def runs_counted(stages: Stages) -> Iterator[list[int]]:
    """A list of one number: how often stages, all modules, are called inside."""
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    handles = [stage.register_forward_hook(count) for stage in {id(s): s for s in stages}.values()]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


def moved_by(net: Chain) -> dict[tuple[Tier, Tier], int]:
    """Bytes that the chain's engine has moved by now, per lane."""
    return dict(net.copies.bytes_moved)
