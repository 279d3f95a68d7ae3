"""The first candidate that fits the device budget, or an error that says what would; seconds and peaks of trees."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import isfinite

from tapestream.costs import Budget, Profile, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import (
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Node,
    Phase,
    PhaseKind,
    Record,
    Repeat,
    Restore,
    Schedule,
    Series,
    Shift,
    Tier,
    Value,
)
from tapestream.simulate import simulate
from tapestream.units import format_nbytes


def device_limit(budget: Budget | str | int | None) -> int | None:
    """Bytes allowed on the device, None for no limit."""
    return Budget.of(budget).device_nbytes


def plain(profile: Profile) -> Profile:
    """The profile without parameter blocks: itself where no stage uses one, since a long copy takes time."""
    return profile.without_blocks() if profile.blocks else profile


def surely_held(profile: Profile) -> int:
    """Device bytes at the turn when everything is stored, at least."""
    n = len(profile)
    stages = profile.stages
    if isinstance(stages, UniformStages):
        tape = n * (stages.cost.saved_nbytes + stages.cost.reads_input * stages.cost.output_nbytes)
        tape += stages.cost.reads_input * (profile.initial_nbytes - stages.cost.output_nbytes)
    else:
        tape = sum(cost.saved_nbytes for cost in stages)
        tape += sum(profile.state_nbytes(k) for k, cost in enumerate(stages) if cost.reads_input)
    return profile.outside_nbytes + tape + profile.cotangent_nbytes(n) + profile.turn_nbytes


def device_peak(root: Node, profile: Profile) -> int:
    """Device bytes at the peak of a tree on a profile (blocks cost nothing here), by the judge."""
    return simulate(Schedule(root, len(profile)), plain(profile)).peak_nbytes[Tier.DEVICE]


def forward_seconds(root: Node, profile: Profile, prefix: list[float]) -> float:
    """Seconds of all forwards and records; ``prefix[k]`` is the forward seconds of stages 0 .. k-1."""
    total, stages = 0.0, profile.stages
    stack: list[tuple[Node, int]] = [(root, 0)]
    while stack:
        node, offset = stack.pop()
        match node:
            case Forward(start, stop):
                total += prefix[stop + offset] - prefix[start + offset]
            case Record(stage):
                total += stages[stage + offset].recorded_seconds
            case Series(children):
                stack += [(child, offset) for child in children]
            case Shift(body, by):
                stack.append((body, offset + by))
            case Repeat(Record(stage), count, 1):
                total += sum(cost.recorded_seconds for cost in stages[stage + offset : stage + offset + count])
            case Repeat(body, count, shift) if not isinstance(body, Backward):
                stack += [(body, offset + i * shift) for i in range(count)]
    return total


def by_seconds(roots: Iterable[Node], profile: Profile) -> list[tuple[float, Node]]:
    """Trees without copies and the seconds of all that they compute, fastest first, the earlier of equals first."""
    prefix = list(accumulate((cost.forward_seconds for cost in profile.stages), initial=0.0))
    always = sum(cost.backward_seconds for cost in profile.stages) + profile.turn_seconds
    timed = [(forward_seconds(root, profile, prefix) + always, root) for root in roots]
    timed.sort(key=lambda pair: pair[0])
    return timed


def first_fit(name: str, candidates: Iterable[Node], profile: Profile, budget: Budget | str | int | None) -> Schedule:
    """The first of ``candidates`` (fastest first) whose device peak fits the budget, as a schedule by planner ``name``.

    Raises BudgetError with the least peak among them and the stage at that peak.
    """
    return _Ranked(name, candidates, profile).first_fit(device_limit(budget))


Timed = Callable[[Profile], list[tuple[float, Node]]]
"""A planner's fixed list of trees for a profile, with their seconds, fastest first."""


def first_timed_fit(name: str, timed: Timed, profile: Profile, budget: Budget | str | int | None) -> Schedule:
    """`first_fit` among ``timed(profile)``.

    Splitting a budget asks for many budgets on one profile: each tree is made and judged once for all of them, and the
    same tree found again is the same Schedule.
    """
    return _ranked(name, timed, plain(profile)).first_fit(device_limit(budget))


@lru_cache(maxsize=8)
def _ranked(name: str, timed: Timed, profile: Profile) -> "_Ranked":
    return _Ranked(name, (root for _, root in timed(profile)), profile)


@dataclass(slots=True)
class _Tree:
    """A schedule, its place in the order, device bytes that it surely takes, and those that the judge found."""

    number: int
    schedule: Schedule
    least_nbytes: int
    peak_nbytes: int | None = None


class _Ranked:
    """Trees for one profile, fastest first. The judge sees each once, and those not that a bound decides."""

    def __init__(self, name: str, trees: Iterable[Node], profile: Profile) -> None:
        self._name, self._new, self._profile = name, iter(trees), profile
        self._trees: list[_Tree] = []

    def first_fit(self, limit: int | None) -> Schedule:
        """As `first_fit`."""
        for tree in self._in_order():
            if limit is None or (tree.least_nbytes <= limit and self._peak(tree) <= limit):
                return tree.schedule
        if limit is None or not self._trees:
            raise InputError(f"{self._name}: the chain of {len(self._profile)} stages has no schedule to choose from")
        leanest = self._leanest()
        raise _too_small(self._name, leanest.schedule.root, self._peak(leanest), self._profile, limit)

    def _in_order(self) -> Iterator[_Tree]:
        yield from self._trees
        for root in self._new:
            schedule = Schedule(root, len(self._profile), planner=self._name)
            self._trees.append(_Tree(len(self._trees), schedule, _least_at_turn(schedule, self._profile)))
            yield self._trees[-1]

    def _leanest(self) -> _Tree:
        """Of least peak, the first of equals."""
        found: _Tree | None = None
        for tree in sorted(self._trees, key=lambda tree: tree.least_nbytes):
            if found is None or (self._peak(tree), tree.number) < (self._peak(found), found.number):
                found = tree
            if tree.least_nbytes > self._peak(found):
                break
        assert found is not None
        return found

    def _peak(self, tree: _Tree) -> int:
        if tree.peak_nbytes is None:
            tree.peak_nbytes = device_peak(tree.schedule.root, self._profile)
        return tree.peak_nbytes


def _least_at_turn(schedule: Schedule, profile: Profile) -> int:
    """Device bytes at the turn, at least: the states that the first sweep has kept and what it has recorded. 0 where
    something moves, and for equal stages, of which there may be too many to walk."""
    stages = profile.stages
    if isinstance(stages, UniformStages):
        return 0
    kept: set[int] = set()
    read: set[int] = set()
    saved = 0
    for action in schedule:
        match action:
            case Keep(stage):
                kept.add(stage)
            case Record(stage):
                saved += stages[stage].saved_nbytes
                if stages[stage].reads_input:
                    read.add(stage)
            case Free(Value(Kind.STATE, index)):
                kept.discard(index)
            case Phase(PhaseKind.BACKWARD):
                break
            case Forward() | Restore() | Phase():
                pass
            case _:
                return 0
    states = sum(profile.state_nbytes(k) for k in kept | read)
    turn = profile.cotangent_nbytes(len(profile)) + profile.turn_nbytes
    return profile.outside_nbytes + states + saved + turn


def _too_small(name: str, root: Node, peak: int, profile: Profile, limit: int) -> BudgetError:
    stage = len(profile) - 1  # also where the peak is at the turn, right after the last stage
    try:
        simulate(Schedule(root, len(profile)), plain(profile), None, Budget(limit))
    except BudgetError as error:
        stage = stage if error.stage is None else error.stage
    return BudgetError(
        f"{name}: a device budget of {format_nbytes(limit)} ({limit} bytes) was asked for, but the leanest schedule "
        f"found needs {format_nbytes(peak)} ({peak} bytes), reached at stage {stage}; give at least {peak} bytes, or "
        "make that stage smaller (a smaller batch, or two stages instead of one)",
        least_nbytes=peak,
        stage=stage,
    )


def finite(name: str, what: str, value: float) -> float:
    """A cost or knob that must be a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isfinite(value) and value >= 0):
        raise InputError(f"{name}: {what} must be a finite number of at least 0, not {value!r}")
    return value


def positive(name: str, knob: str, value: int, most: int) -> int:
    """A whole-number knob between 1 and ``most``; larger values are cut to ``most``, others raise InputError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: {knob} must be a whole number of at least 1, not {value!r}")
    return min(value, most)
