"""The first candidate that fits the device budget, or an error that says what would."""

from collections.abc import Iterable

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Node, Record, Schedule, Tier
from tapestream.simulate import simulate
from tapestream.units import format_nbytes


def device_limit(budget: Budget | str | int | None) -> int | None:
    """Bytes allowed on the device, None for no limit."""
    return Budget.of(budget).device_nbytes


def device_peak(root: Node, profile: Profile) -> int:
    """Device bytes at the peak of a tree on a profile (blocks cost nothing here), by the judge."""
    plain = profile.without_blocks()
    return simulate(Schedule(root, len(profile)), plain).peak_nbytes[Tier.DEVICE]


def forward_seconds(root: Node, profile: Profile, prefix: list[float]) -> float:
    """Seconds of all forwards and records; ``prefix[k]`` is the forward seconds of stages 0 .. k-1."""
    total = 0.0
    for action in Schedule(root, len(profile)):
        match action:
            case Forward(start, stop):
                total += prefix[stop] - prefix[start]
            case Record(stage):
                total += profile.stages[stage].recorded_seconds
    return total


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
        simulate(Schedule(root, len(profile)), profile.without_blocks(), None, Budget(limit))
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
