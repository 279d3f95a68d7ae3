"""Claim: leaving out a planner that is not tried by default makes no plan more than 1% slower.

Cases are drawn: chains, streamed models and loops of equal steps; with the device alone, with a tier below it and with
two; stages that cost alike, anything, or several times as much as their neighbours. Each is planned by `auto` and by
`joint`, and a loop as `ts.Loop` does it too: with all of `TRIED` competing beside what is tried anyway, then with each
of them left out, then without all that are not tried by default. What is compared is the fastest plan found, by the
judge. A case counts as slower from a millionth on. Where nothing fits without the planner, the case is lost. Of cases
for which leaving out all of them changes nothing, none is left out by itself: fewer planners never find more.

The last rows are the processor time of planning the same cases, with all of `TRIED` and as it is by default, in turn.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import inf
from unittest.mock import patch

from benchmarks.common import Row, Settings, alternate, save, settings, yes
from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError
from tapestream.frontends.loop.plans import choose
from tapestream.frontends.loop.tier_plans import choose_below
from tapestream.ir import Tier
from tapestream.passes.residency import UpdateMode
from tapestream.planners import joint, planners
from tapestream.planning import auto

TITLE = "What planners are worth: the fastest plan found without them"
TRIED = (
    "bisection", "binomial", "mixed", "async_multistage", "disk_revolve", "periodic_disk_revolve", "h_revolve",
)  # fmt: skip
_MOVE = ("async_multistage", "disk_revolve", "periodic_disk_revolve", "h_revolve")
_UNEQUAL = ("bisection", "binomial")
_MIXED, _LONG = 256, 2000  # stages that these planners are tried for
_SLOWER, _MUCH = 1 + 1e-6, 1.01
_CASES = 208
_BY_LOOPS = "async_multistage"  # the one of them that `ts.Loop` tries by itself
_KINDS = {"chain": (1, 2, 3), "model": (2, 3), "loop": (1, 2, 3)}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step of a chain, a streamed model or a loop, within ``budget`` bytes of the device and so many tiers."""

    kind: str
    tiers: int
    profile: Profile
    machine: Machine
    budget: int
    update: UpdateMode = None


def main() -> None:
    """Draw, plan and count."""
    chosen = settings("cpu", rounds=3)
    save("ablation", TITLE, chosen, rows(chosen), cases=_CASES)


def rows(chosen: Settings) -> Iterator[Row]:
    """A row for each planner that is left out and each who asks, one for all left out, and those of the time."""
    cases, default = drawn(16 if chosen.quick else _CASES), by_default()
    full, none = ([fastest(case, names) for case in cases] for names in (TRIED, ()))

    def without(left_out: Sequence[str]) -> list[dict[str, float]]:
        left = [name for name in TRIED if name not in left_out]
        return [
            found if found == bare else fastest(case, left) for case, found, bare in zip(cases, full, none, strict=True)
        ]

    for name in TRIED:
        yield from _rows(name, cases, full, without([name]), tried=name in default)
    others = [name for name in TRIED if name not in default]
    yield from _rows("all that are not tried by default", cases, full, without(others), tried=False)
    yield from _times(cases, default, chosen)


def by_default() -> list[str]:
    """Those of `TRIED` that compete without being asked for."""
    return [name for name in TRIED if name in auto._competitors(Profile.uniform(8))]


def fastest(case: Drawn, tried: Sequence[str]) -> dict[str, float]:
    """Seconds of the fastest plan found, by who is asked; infinite where none fits."""
    with competing(tried):
        found = {"auto": _planned(case, "auto"), "joint": _planned(case, "joint")}
    if case.kind == "loop" and case.tiers > 1:
        found["Loop"] = _looped(case, _BY_LOOPS in tried)
    return found


def _planned(case: Drawn, planner: str) -> float:
    try:
        plan = auto.make_plan(case.profile, case.budget, case.machine, planner=planner, update=case.update)
    except BudgetError:
        return inf
    return plan.fastest_seconds or plan.seconds


def _looped(case: Drawn, moves: bool) -> float:
    cost, steps, budget = case.profile.stages[0], len(case.profile), Budget(case.budget)
    try:
        if moves:
            return choose_below(cost, steps, case.machine, budget, "auto", None, {}).plan.seconds
        return choose(cost, steps, budget, "auto", None, {}).plan.seconds
    except BudgetError:
        return inf


@contextmanager
def competing(names: Sequence[str]) -> Iterator[None]:
    """Of `TRIED` exactly ``names`` compete in `auto` and `joint`, for profiles that they are for."""
    candidates, competitors = auto.candidates, auto._competitors

    def among(found: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
        kept = [name for name in found if name not in TRIED]
        last = [name for name in kept if name == "joint"]
        return (*kept[: len(kept) - len(last)], *more, *last)

    def of_auto(profile: Profile, machine: Machine | None = None) -> tuple[str, ...]:
        below, equal = bool(machine and machine.links), isinstance(profile.stages, UniformStages)
        longest = {"bisection": inf, "mixed": _MIXED if below else 0, "binomial": _MIXED if below else 0}
        more = [
            name for name in names
            if name == "bisection"
            or (name != "disk_revolve" and below and equal and not profile.blocks
                and len(profile) <= longest.get(name, _LONG))
        ]  # fmt: skip
        return among(candidates(profile, machine), more)

    def of_joint(profile: Profile) -> tuple[str, ...]:
        equal, short = isinstance(profile.stages, UniformStages), len(profile) <= _LONG
        more = [name for name in names if name == "bisection" or (short and (equal or name in _UNEQUAL))]
        return among(competitors(profile), more)

    left = [other for other in joint.COMPETITORS if _name(other) not in TRIED]
    with ExitStack() as stack:
        stack.enter_context(patch.object(auto, "candidates", of_auto))
        stack.enter_context(patch.object(auto, "_competitors", of_joint))
        stack.enter_context(patch.object(joint, "COMPETITORS", (*left, *map(_competitor, names))))
        yield


def _name(other: joint.Competitor) -> str:
    return other.plan.__module__.rpartition(".")[2]


def _competitor(name: str) -> joint.Competitor:
    module = import_module(planners[name].__module__)
    return joint.Competitor(module.plan, getattr(module, "timed", None), name in _MOVE)


def _rows(
    name: str, cases: list[Drawn], full: list[dict[str, float]], without: list[dict[str, float]], *, tried: bool
) -> Iterator[Row]:
    for asked in ("auto", "joint", "Loop") if name == _BY_LOOPS else ("auto", "joint"):
        pairs = [
            (case, one[asked], other[asked])
            for case, one, other in zip(cases, full, without, strict=True)
            if one.get(asked, inf) < inf
        ]
        ratios = [(case, after / before) for case, before, after in pairs if after < inf]
        slower, lost = Counter(case.kind for case, ratio in ratios if ratio > _SLOWER), len(pairs) - len(ratios)
        worst = max(ratio for _, ratio in ratios)
        row: Row = {
            "left out": name, "asked": asked, "plans": len(pairs), "slower": slower.total(),
            "slower chains": slower["chain"], "slower models": slower["model"], "slower loops": slower["loop"],
            "slower by over 1%": sum(ratio > _MUCH for _, ratio in ratios), "lost": lost,
            "ratio": round(worst, 4), "tried by default": yes(tried),
        }  # fmt: skip
        claim = {} if tried else {"claim": f"at most {_MUCH}", "met": yes(worst <= _MUCH and not lost)}
        yield row | claim


def _times(cases: list[Drawn], default: Sequence[str], chosen: Settings) -> Iterator[Row]:
    """Of every sixth case, so that a round is short."""
    for kind in _KINDS:
        some = [case for case in cases if case.kind == kind][::6]
        for asked in ("auto", "joint"):

            def plan_all(names: Sequence[str], some: list[Drawn] = some, asked: str = asked) -> None:
                with competing(names):
                    for case in some:
                        _planned(case, asked)

            runs = {"all": lambda plan_all=plan_all: plan_all(TRIED), "default": lambda p=plan_all: p(default)}
            timings = alternate(runs, chosen.rounds, "cpu")
            yield {
                "left out": "planning time, by default", "asked": asked, "plans": len(some), "kind": kind,
                "processor seconds with all": round(sorted(timings.cpu["all"])[chosen.rounds // 2], 3),
                "processor seconds": round(sorted(timings.cpu["default"])[chosen.rounds // 2], 3),
                "ratio of processor time": timings.ratio("default", "all")["ratio of processor time"],
            }  # fmt: skip


def drawn(count: int) -> list[Drawn]:
    """So many cases, the same each time: every kind with every number of tiers in turn."""
    kinds = [(kind, tiers) for kind, several in _KINDS.items() for tiers in several]
    with competing(TRIED):
        return [_drawn(*kinds[number % len(kinds)], random.Random(number)) for number in range(count)]


def _drawn(kind: str, tiers: int, draw: random.Random) -> Drawn:
    """A budget from the least that `auto` names to half of the way to what storing everything takes."""
    profile, update = _profile(kind, draw), None
    if kind == "model":
        update = draw.choice(("step", "backward", None))
    machine = _machine(profile, tiers, draw)
    stored = auto.make_plan(profile, None, machine, update=update).peak_nbytes
    try:
        least = auto.make_plan(profile, 1, machine, update=update).peak_nbytes
    except BudgetError as error:
        least = error.least_nbytes or 1
    budget = least + round((stored - least) * draw.choice((0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)))
    return Drawn(kind, tiers, profile, machine, budget, update)


def _profile(kind: str, draw: random.Random) -> Profile:
    state = draw.choice((20, 100, 1000))
    saved = round(state * draw.choice((1, 1, 1.5, 2, 4, 8)))
    alike = StageCost(1.0, draw.uniform(1, 3), state, saved)
    if kind == "loop":
        return Profile(UniformStages(alike, round(10 ** draw.uniform(0.9, 2.3))), state)
    n = draw.randint(4, 40 if kind == "chain" else 8)
    uneven = draw.choice(("alike", "anything", "heavy", "shrinking"))
    stages = [_stage(uneven, k, n, alike, draw) for k in range(n)]
    if kind == "chain":
        return Profile(UniformStages(alike, n) if uneven == "alike" else tuple(stages), state)
    nbytes = round(state * draw.choice((1, 4, 16)))
    if uneven == "alike" and draw.random() < 0.5:  # the same block again and again
        one = BlockCost(nbytes, nbytes, 2 * nbytes, update_seconds=0.1)
        return Profile(UniformStages(replace(alike, block=0), n), state, (one,))
    sizes = [round(nbytes * (draw.uniform(0.3, 3) if uneven == "anything" else 1)) for _ in stages]
    blocks = tuple(BlockCost(size, size, 2 * size, update_seconds=0.1) for size in sizes)
    return Profile(tuple(replace(cost, block=k) for k, cost in enumerate(stages)), state, blocks)


def _stage(uneven: str, k: int, n: int, alike: StageCost, draw: random.Random) -> StageCost:
    """One like the others, one that differs in everything, one of which every third is heavy, one of a pyramid."""
    seconds = nbytes = saved = 1.0
    if uneven == "anything":
        seconds, nbytes, saved = (draw.uniform(0.3, 3) for _ in range(3))
    elif uneven == "heavy":
        seconds = 0.3 if k % 3 else 4.0
    elif uneven == "shrinking":
        nbytes = saved = 0.5 ** (3 * k // n)
    return StageCost(
        alike.forward_seconds * seconds, alike.backward_seconds * seconds, max(1, round(alike.output_nbytes * nbytes)),
        max(1, round(alike.saved_nbytes * saved)),
    )  # fmt: skip


def _machine(profile: Profile, tiers: int, draw: random.Random) -> Machine:
    """Links that carry, in the seconds of the forwards, between a twentieth of what the stages keep and twice that."""
    stages = list(profile.stages)
    seconds = sum(cost.forward_seconds for cost in stages)
    kept = sum(cost.saved_nbytes + cost.output_nbytes for cost in stages) + sum(
        block.parameters_nbytes for block in profile.blocks
    )
    device, host, disk = Tier.DEVICE, Tier.HOST, Tier.DISK
    near, far = kept / seconds * draw.uniform(0.05, 2), kept / seconds * draw.uniform(0.02, 0.5)
    late = draw.choice((0.0, 0.0, 0.1)) * seconds / len(stages)
    if tiers == 2 and draw.random() < 0.4:
        ends = [(device, disk, near)]  # a disk that the device reaches
    else:
        ends = [(device, host, near), (host, disk, far)][: tiers - 1]
    links = {
        pair: Link(speed, late, busy_seconds=late / 2)
        for one, other, speed in ends
        for pair in ((one, other), (other, one))
    }
    return Machine(links)


if __name__ == "__main__":
    main()
