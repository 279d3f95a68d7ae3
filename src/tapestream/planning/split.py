"""Splitting the device budget between the tape, values that stay there, and blocks that pass through."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import ceil

from tapestream.costs import Budget, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Forward, Kind, Schedule, Tier
from tapestream.passes.memory import block_values, compute_seconds
from tapestream.passes.parameters import stream_parameters
from tapestream.passes.stays import Occupancy
from tapestream.passes.streaming import Streaming
from tapestream.planning.choices import Terms, in_order, largest_block, streaming_of
from tapestream.planning.fastest import AS_FAST, SHORT, Found, best_candidate, judged_as, spared

_LEVELS = (5, 3)  # tape budgets tried, for short and for long chains
_LEANER = 1.01  # less than that is not worth more recomputing
_GATHERING = 2000  # stages; longer chains are planned as if all gradients were there throughout


@dataclass(frozen=True, slots=True)
class Tapes:
    """What one planner makes for a device budget of the tape alone. ``plain``: the profile as it sees it; ``staying``:
    the same with gradients that stay where backward makes them, None where they do not."""

    plan: Callable[[Profile, Budget], Schedule]
    plain: Profile
    staying: Profile | None = None

    def within(self, budget: Budget) -> Schedule:
        """A tape beside which what blocks hold is the same all the time."""
        return self.plan(self.plain, budget)

    def beside_gradients(self, nbytes: int) -> Schedule | None:
        """One within ``nbytes`` together with the gradients that are there: none at the turn, all of them at the end.
        None where they do not stay, or none fits."""
        if self.staying is None or nbytes <= 0:
            return None
        with suppress(BudgetError, InputError):
            return self.plan(self.staying, Budget(nbytes))
        return None

    def leanest(self) -> Iterator[Schedule]:
        """The schedules of least bytes, with gradients gathering beside them and without."""
        yield self.within(Budget(_least(self.within)))
        if self.staying is not None:
            with suppress(BudgetError, InputError):
                beside = self.staying
                yield self.plan(beside, Budget(_least(lambda budget: self.plan(beside, budget))))


def gradients_may_stay(terms: Terms) -> bool:
    """Whether gradients of blocks may gather on the device in a backward."""
    profile, limited = terms.profile, terms.budget.device_nbytes is not None
    gathering = limited and not terms.accumulate and terms.update != "backward" and not terms.hosted.blocks
    return gathering and len(profile) <= _GATHERING and any(block.gradient_nbytes for block in profile.blocks)


def best_split(tapes: Tapes, terms: Terms, faster_than: float = float("inf")) -> Found | None:
    """The fastest schedule found for the tapes that one planner makes, or one that counts as equally fast and runs or
    moves less; None when no bound is about as fast as ``faster_than``.

    Tries a few tape budgets between the least it
    can and all that is there; for each, resident values that leave room for none, one or two more blocks in
    flight, for half of what is left or for none at all. Simulates in order of a lower bound (computation, and
    bytes of each lane, phase by phase), a bounded number of times. Raises BudgetError with the least device
    budget when nothing fits.
    """
    slowest = faster_than * AS_FAST
    if _surely_slower(tapes, terms, slowest):
        return None
    streamings: dict[tuple[int, int, float], Streaming] = {}
    leanest: Streaming | None = None
    before: Schedule | None = None
    slower = False
    for schedule in _schedules(tapes, terms):
        if _takes(schedule, terms, slowest):  # the leanest may run each stage a hundred times
            slower = True
        elif schedule != before:
            before, leanest = schedule, streaming_of(schedule, terms)
            looks = len(leanest.computation), int(leanest.base.during.max()), float(leanest.seconds[-1])
            leanest = streamings.setdefault(looks, leanest)
    worth_it = [(looks[2], streaming) for looks, streaming in streamings.items() if looks[2] < slowest]
    ordered = in_order(worth_it, terms)
    first = next(((bound, candidate) for bound, candidate in ordered if candidate is not None), None)
    if first is not None:
        return best_candidate(chain([first], ordered), terms, faster_than)
    if leanest is not None and not slower and len(worth_it) == len(streamings):
        raise _too_small(leanest, terms)
    return None


def _surely_slower(tapes: Tapes, terms: Terms, seconds: float) -> bool:
    """Whether the planner's computation takes ``seconds`` with all the bytes that a tape could have, so with fewer."""
    limit = terms.budget.device_nbytes
    if limit is None or seconds == float("inf"):
        return False
    try:
        return _takes(tapes.within(Budget(limit)), terms, seconds)
    except BudgetError:
        return False


def _takes(schedule: Schedule, terms: Terms, seconds: float) -> bool:
    """Whether the computation of ``schedule`` takes ``seconds``. It is not walked further than that."""
    total = 0.0
    for action in schedule if seconds < float("inf") else ():
        total += compute_seconds(action, terms.profile)
        if total >= seconds:
            return True
    return False


def best_resident(tapes: Tapes, terms: Terms) -> Found:
    """The fastest schedule found with every parameter block on the device; the tape gets what they leave: while
    gradients gather, less and less.

    Keeps the schedule's tree. Raises BudgetError with a device budget that works when nothing fits.
    """
    gradients, others = _sums(terms.profile)
    limit = terms.budget.device_nbytes
    if limit is None:
        return _on_device(tapes.within(Budget()), terms)
    found: list[Found] = []
    for gathering in (True, False):  # rounding may lose either
        with suppress(BudgetError):
            schedule = (
                tapes.beside_gradients(limit - others) if gathering else tapes.within(Budget(max(1, limit - others)))
            )
            found += [] if schedule is None else [_on_device(schedule, terms)]
        if found and found[-1].simulation.forwards == terms.profile.runs:
            break
    if found:
        return min(found, key=lambda one: one.seconds)
    if limit > others + gradients:
        with suppress(BudgetError):
            return _on_device(tapes.within(Budget(limit - others - gradients)), terms)
    refusals: list[BudgetError] = []
    for schedule in tapes.leanest():
        try:
            return _on_device(schedule, terms)
        except BudgetError as error:
            refusals.append(error.to_keep())
    least = min(refusals, key=lambda error: (error.least_nbytes or 0) * (1 if error is refusals[0] else _LEANER))
    raise BudgetError(least.message, least_nbytes=least.least_nbytes, stage=least.stage)


def _on_device(schedule: Schedule, terms: Terms) -> Found:
    schedule = stream_parameters(
        schedule, terms.profile, None, terms.machine,
        home=Tier.DEVICE, update=terms.update, accumulate=terms.accumulate,
    )  # fmt: skip
    return spared(judged_as(schedule, terms), terms)


def _least(tape: Callable[[Budget], Schedule]) -> int:
    """The least tape budget that the planner says it can do with."""
    try:
        tape(Budget(1))
    except BudgetError as error:
        if error.least_nbytes is None:
            raise
        return error.least_nbytes
    return 1


def _schedules(tapes: Tapes, terms: Terms) -> Iterator[Schedule]:
    """The planner's schedules: the one that has gradients gather beside it, with all other values of blocks on the
    device; then those for a few tape budgets, largest first, the least that it can last."""
    limit = terms.budget.device_nbytes
    if limit is None:
        yield tapes.within(Budget())
        return
    beside = tapes.beside_gradients(limit - _sums(terms.profile)[1])
    if beside is not None:
        yield beside
    least = _least(tapes.within)
    for nbytes in _levels(least, limit, terms):
        try:
            yield tapes.within(Budget(nbytes))
        except BudgetError:
            continue


def _levels(least: int, limit: int, terms: Terms) -> list[int]:
    """Tape budgets from all that could be had down to ``least``: beside everything resident, and evenly in between."""
    gradients, others = _sums(terms.profile)
    kept = 0
    if terms.resident is not None:
        kept = sum(n for value, n in block_values(terms.profile) if value in terms.resident)
    highest = max(least, limit - kept - largest_block(terms.profile))
    count = _LEVELS[len(terms.profile) > SHORT]
    ratio = (least / highest) ** (1 / (count - 1))
    levels = {ceil(highest * ratio**i) for i in range(count)} | {limit - others, limit - others - gradients, least}
    return sorted((nbytes for nbytes in levels if nbytes >= least), reverse=True)


def _sums(profile: Profile) -> tuple[int, int]:
    """Bytes of all gradients, and of all other block values."""
    gradients = sum(nbytes for value, nbytes in block_values(profile) if value.kind is Kind.GRADIENT)
    return gradients, sum(nbytes for _, nbytes in block_values(profile)) - gradients


def _too_small(leanest: Streaming, terms: Terms) -> BudgetError:
    """The least device budget that the planner can do with, parameters just in time."""
    nbytes = Occupancy(leanest.base, leanest.stays(terms.resident or frozenset())).nbytes
    position = int(nbytes.argmax())
    action = leanest.computation[position]
    stage = action.start if isinstance(action, Forward) else getattr(action, "stage", None)
    return BudgetError(f"{action} needs {nbytes[position]} bytes", least_nbytes=int(nbytes[position]), stage=stage)
