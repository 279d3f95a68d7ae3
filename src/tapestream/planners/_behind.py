"""Computations made for more device memory than there is, what exceeds it moved behind them (`joint`)."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import gcd, inf
from typing import Literal, NamedTuple, TypeAlias

from tapestream.costs import Budget, Machine, Profile
from tapestream.ir import Action, Kind, Node, Schedule, Tier, iterate
from tapestream.planners import rotor
from tapestream.planners._again import otherwise
from tapestream.planners._coarse import Short, expanded
from tapestream.planners._hide import ORDERS, Choice, Computation, Gap, Order, without_copies
from tapestream.planners._judged import is_within
from tapestream.planners._patterns import SHORTEST, every_pattern, patterned
from tapestream.planners._rotor_tables import Fastest, Leanest, Scale
from tapestream.planners._tiers import DEVICE
from tapestream.planners._units import Run, arrange
from tapestream.planners.store_all import stored
from tapestream.simulate import simulate

Moves: TypeAlias = Literal["all", "states", "none"]
WIDTH = 64  # stages that copies are planned for; longer chains as so many runs
_EXPANDED = 2  # computations with copies that are judged in full
_MANY = 20_000  # stages; of longer chains one is
_IMPROVED = 12  # computations whose copies are improved
_FACTORS = (0.5, 0.8, 1.0, 1.3)  # of the bytes that cross the link during the forward sweep, recorded meanwhile
_TRIALS = 30_000  # actions judged for that
_STEPS = 400  # of memory, in the tables of these
_FEW = 16  # stages; of shorter chains all computations of the table are tried
_OTHERWISE = 100  # computations of the shortest chains that recompute otherwise
_PATTERNS = 400  # computations of the shortest chains that are tried besides
_LEVELS = 12  # device budgets that computations are made for, from the given one to that of everything stored


class _Way(NamedTuple):
    seconds: float
    computation: Computation
    order: Order
    choice: Choice
    actions: list[Action]


@dataclass(frozen=True, slots=True)
class Hiding:
    """Computations made for more device memory than there is, and what exceeds it moved behind them."""

    short: Short
    budget: Budget
    machine: Machine | None
    tier: Tier
    moves: Moves

    def roots(self, bound: float) -> Iterator[Node]:
        """The fastest few that were found, for the whole chain; ``bound``: seconds that cannot be beaten."""
        ways: list[_Way] = []
        seen: set[tuple[int, ...]] = set()
        roots = _computations(self.short.profile, self.budget.device_nbytes or 0)
        for root in chain(roots, _interleaved(self.short, self.machine, self.tier)):
            computation = Computation.of(without_copies(iterate(root)), self.short.profile, self.short.moving)
            if (signature := tuple(computation.nbytes)) in seen:
                continue
            seen.add(signature)
            ways += self.fastest_order(computation)
        if len(self.short.profile) <= SHORTEST:
            ways += self.patterns(min((way.seconds for way in ways), default=inf), seen)
            ways += self.otherwise(_promising(ways))
        ways += self.all_improved(_promising(ways), bound)
        for way in sorted(ways, key=lambda way: way.seconds)[: _EXPANDED if self.short.points[-1] <= _MANY else 1]:
            yield expanded(way.actions, self.short.points)

    def all_improved(self, ways: Sequence[_Way], bound: float) -> Iterator[_Way]:
        """Each that may get faster than all of them, improved; `_TRIALS` actions judged for all together."""
        best = min((way.seconds for way in ways), default=inf)
        trials = _TRIALS // len(ways[0].actions) if ways else 0
        for way in ways:
            if best > bound * (1 + 1e-9) and way.computation.seconds < best:
                better, used = self.improved(way, bound, trials // 2)
                trials -= used
                best = min(best, better.seconds)
                yield better

    def fastest_order(self, computation: Computation) -> list[_Way]:
        """The fastest way to make it fit, without exceptions to an order; empty where none does."""
        if self.moves == "states":
            computation.gaps = [gap for gap in computation.gaps if gap.value.kind is Kind.STATE]
        few = len(self.short.profile) <= _FEW
        choices = (Choice(), Choice(as_needed=True)) if few else (Choice(),)
        orders = ORDERS if few else ORDERS[:-1]
        found = [way for order, choice in product(orders, choices) for way in self.tried(computation, order, choice)]
        return sorted(found, key=lambda way: way.seconds)[:1]

    def patterns(self, seconds: float, seen: set[tuple[int, ...]]) -> Iterator[_Way]:
        """Ways of `every_pattern` that may be faster than ``seconds``, at most `_PATTERNS` tried."""
        profile = self.short.profile
        for least, root in every_pattern(profile, self.budget.device_nbytes or 0, self.machine, self.tier)[:_PATTERNS]:
            if least >= seconds:
                return
            computation = Computation.of(list(iterate(root)), profile, self.short.moving)
            if (signature := tuple(computation.nbytes)) not in seen:
                seen.add(signature)
                for way in self.fastest_order(computation):
                    seconds = min(seconds, way.seconds)
                    yield way

    def otherwise(self, ways: Sequence[_Way]) -> Iterator[_Way]:
        """Ways that recompute otherwise, in one stretch and then in others too, at most `_OTHERWISE` tried."""
        profile, moving = self.short.profile, self.short.moving
        queue = deque(way.computation.actions for way in ways)
        seen = {tuple(actions) for actions in queue}
        while queue:
            for actions in otherwise(queue.popleft()):
                if tuple(actions) not in seen and len(seen) < _OTHERWISE:
                    seen.add(tuple(actions))
                    for way in self.fastest_order(Computation.of(actions, profile, moving)):
                        queue.append(actions)
                        yield way

    def tried(self, computation: Computation, order: Order, choice: Choice) -> Iterator[_Way]:
        """One way to make it fit, if it does."""
        actions = computation.within(self.budget.device_nbytes, self.tier, order, choice)
        if actions is None:
            return
        judged = simulate(Schedule.of(actions, len(self.short.moving)), self.short.moving, self.machine)
        if is_within(judged, self.budget):
            yield _Way(judged.makespan_seconds, computation, order, choice, actions)

    def improved(self, way: _Way, bound: float, most: int) -> tuple[_Way, int]:
        """Changes of what one value does, as long as they help, and how many of ``most`` trials it took."""
        trials, changed = 0, True
        while changed:
            changed = False
            for gap in range(len(way.computation.gaps)):
                for choice in self.changes(way.choice, gap, way.computation.gaps[gap]):
                    if trials >= most or way.seconds <= bound * (1 + 1e-9):
                        return way, trials
                    trials += 1
                    for other in self.tried(way.computation, way.order, choice):
                        if other.seconds < way.seconds:
                            way, changed = other, True
        return way, trials

    def changes(self, choice: Choice, gap: int, span: Gap) -> Iterator[Choice]:
        """Other choices for one gap; on short chains with copies issued in the other order too, on the shortest with
        its value away from any action on."""
        for changed in choice.changed(gap):
            yield changed
            if len(self.short.profile) <= _FEW:
                yield changed._replace(as_needed=not changed.as_needed)
        if len(self.short.profile) <= SHORTEST:
            others = frozenset(pair for pair in choice.away if pair[0] != gap)
            for position in range(span.start + 1, span.stop):
                yield choice._replace(away=others | {(gap, position)})


def _promising(ways: list[_Way]) -> list[_Way]:
    """The fastest few, and those of the least computation: copies may be what holds these up."""
    fastest = sorted(ways, key=lambda way: way.seconds)[:_IMPROVED]
    least = sorted(ways, key=lambda way: way.computation.seconds)[:_IMPROVED]
    found = {id(way): way for pair in zip(fastest, least, strict=True) for way in pair}
    return list(found.values())


def _computations(profile: Profile, limit: int) -> Iterator[Node]:
    """Trees by the recurrence of `rotor`, for device budgets from ``limit`` to that of everything stored."""
    n = len(profile)
    run, always = Run.of(profile)
    units = arrange(run, profile.turn_nbytes, n, 1)
    top = simulate(Schedule(stored(n), n), profile).peak_nbytes[DEVICE]
    scale = Scale.of(max(1, top - always), _STEPS, gcd(run.grain(), profile.turn_nbytes))
    table = Fastest(units, scale)
    yield rotor.opening(rotor.tree(Leanest(units), 0, 0, {}))
    levels = _LEVELS if n > _FEW else max(_LEVELS, min(_STEPS, (top - limit) * scale.steps // scale.nbytes))
    for level in range(levels + 1):
        nbytes = limit + (top - limit) * level // levels - always
        steps = min(nbytes * scale.steps // scale.nbytes, scale.capacity)
        if steps >= 0 and table.seconds_with(steps) < inf:
            yield rotor.opening(rotor.tree(table, 0, steps, {}))


def _interleaved(short: Short, machine: Machine | None, tier: Tier) -> Iterator[Node]:
    """Computations that record about as much as the link takes away meanwhile, spread evenly up to a tail, and all of
    the tail; what lies between two recorded stages is recomputed from its first state. `rotor` does not tell where
    recorded stages lie, a busy link does."""
    stages, n = short.moving.stages, len(short.moving)
    rate = inf if machine is None else machine.link(DEVICE, tier).bytes_per_second
    if rate == inf:
        return
    tails = sorted({n * eighths // 8 for eighths in range(2, 9)})
    for tail, factor in product(tails, _FACTORS):
        credit, taken = 0.0, []
        for k, cost in enumerate(stages):
            credit += factor * rate * cost.forward_seconds
            taken.append(k >= tail or credit >= cost.saved_nbytes)
            credit -= cost.saved_nbytes if taken[-1] else 0
        yield patterned(["record" if k else "forward" for k in taken])
