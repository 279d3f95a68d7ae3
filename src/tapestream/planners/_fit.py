"""The first candidate that fits the device budget, or an error that says what would; seconds and peaks of trees."""

from collections.abc import Iterable
from itertools import accumulate

from tapestream.costs import Budget, Profile, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Backward, Forward, Node, Record, Repeat, Schedule, Series, Shift, Tier
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
    limit = device_limit(budget)
    least: tuple[int, Node] | None = None
    for root in candidates:
        if limit is None:
            return Schedule(root, len(profile), planner=name)
        peak = device_peak(root, profile)
        if peak <= limit:
            return Schedule(root, len(profile), planner=name)
        if least is None or peak < least[0]:
            least = peak, root
    if least is None or limit is None:
        raise InputError(f"{name}: the chain of {len(profile)} stages has no schedule to choose from")
    raise _too_small(name, least[1], least[0], profile, limit)


def _too_small(name: str, root: Node, peak: int, profile: Profile, limit: int) -> BudgetError:
    stage = len(profile) - 1  # also where the peak is at the turn, right after the last stage
    try:
        simulate(Schedule(root, len(profile)), plain(profile), None, Budget(limit))
    except BudgetError as error:
        stage = stage if error.stage is None else error.stage
    return BudgetError(
        f"{name}: a device budget of {format_nbytes(limit)} ({limit} bytes) was asked for, but the leanest schedule "
        f"found needs {format_nbytes(peak)} ({peak} bytes), reached at stage {stage}; "
        f"give at least {peak} bytes, or make that stage smaller (less batch, or two stages instead of one)",
        least_nbytes=peak,
        stage=stage,
    )


def positive(name: str, knob: str, value: int, most: int) -> int:
    """A whole-number knob between 1 and ``most``; larger values are cut to ``most``, others raise InputError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: {knob} must be a whole number of at least 1, not {value!r}")
    return min(value, most)
