"""Recompute and offload together, on one clock (after Beaumont, Eyraud-Dubois, Shilova 2021, "POFO"; ours)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from tapestream.costs import Budget, Machine, Profile, StageCost, UniformStages
from tapestream.errors import BudgetError, InputError
from tapestream.ir import Node, Schedule, Tier
from tapestream.planners import (
    async_multistage,
    bisection,
    double,
    least_peak,
    offload,
    online,
    periodic,
    revolve,
    rotor,
    superneurons,
)
from tapestream.planners._behind import WIDTH, Hiding, Moves
from tapestream.planners._bound import least_seconds
from tapestream.planners._coarse import coarse
from tapestream.planners._fit import plain, surely_held
from tapestream.planners._judged import Candidate, direct_tier, is_within
from tapestream.planners._tiers import DEVICE, fastest_below
from tapestream.planners.store_all import stored
from tapestream.simulate import simulate

NAME = "joint"
ONLINE = 64  # stages; `online` is for lengths that are not known, and slow to plan
_LONG = 2500  # stages; for longer chains the planners that judge many candidates are left out
_JUDGED = 20_000  # stages; copies are judged action by action


def plan(
    profile: Profile,
    budget: Budget | str | int | None = None,
    machine: Machine | None = None,
    *,
    tier: Tier | str | None = None,
    moves: Moves = "all",
) -> Schedule:
    """The fastest schedule found that recomputes, or moves states and saved tensors to ``tier``, or both, overlapped.

    Computations are made by the recurrence of `rotor` for 13 device budgets (for few stages more) from the given one to
    that of everything stored, and what exceeds the given one is moved behind them, for a few orders of who makes room
    (`_hide`); then choices of single values are changed as long as that helps, a bounded number of times. Up to 8
    stages, computations said stage by stage (`_patterns`) are tried besides, 400 at most, and other ways to recompute
    (`_again`). The planners of `COMPETITORS` that apply with this machine, `superneurons` and `offload` compete, so it
    is never slower than any of them: their candidates are judged as long as their computation alone is faster than what
    was found. Those of `classic` do not: where this was tried they made no plan faster. ``moves`` "states" leaves
    saved tensors where they are, "none" recomputes only. With parameter blocks on a machine with links a stage takes at
    least the seconds in which its parameters and gradients cross the link, and `rotor` alone is asked.

    Ours; optimal only where `_bound.least_seconds` is reached. Chains beyond 64 stages get copies for 64 runs of
    stages, and `online` no longer competes; beyond 2,500 unequal ones only `rotor` and copies behind computation do.
    ``tier`` left out: the fastest linked to the device, none without links; without a machine copies take no time.
    Raises BudgetError when nothing fits, InputError for other knobs and a ``tier`` without a direct link.
    """
    if moves not in ("all", "states", "none"):
        raise InputError(f"{NAME}: moves is 'all', 'states' or 'none', not {moves!r}")
    n, chain = len(profile), plain(profile)
    streamed = bool(profile.blocks and machine is not None and machine.links)
    if streamed and machine is not None:
        chain = _streamed(profile, machine)
    target = None if moves == "none" else _target(machine, tier)
    best = _Best(chain, Budget.of(budget), machine if target is not None else Machine())
    limit = best.budget.device_nbytes
    if limit is None:
        return Schedule(stored(n), n, planner=NAME)
    if surely_held(chain) <= limit and best.consider(stored(n)):
        return best.schedule(tier, moves)  # nothing runs twice, nothing waits
    best.bound_unmoved = least_seconds(chain, limit, Machine())
    best.bound = best.bound_unmoved if target is None else least_seconds(chain, limit, machine)
    if target is not None:
        hiding = Hiding(coarse(chain, WIDTH), best.budget, best.machine, target, moves)
        for root in hiding.roots(best.bound):
            best.consider(root)
    if best.open_unmoved:
        best.first(rotor.timed(chain, limit))
    if not streamed:
        _others(best, target)
    return best.schedule(tier, moves)


def _streamed(profile: Profile, machine: Machine) -> Profile:
    """The chain without blocks, every stage at least as slow as its block's way over the link to the device."""
    into = [link.bytes_per_second for (_, target), link in machine.links.items() if target is Tier.DEVICE]
    out = [link.bytes_per_second for (source, _), link in machine.links.items() if source is Tier.DEVICE]
    if not into or not out:
        return profile.without_blocks()

    def slowed(cost: StageCost) -> StageCost:
        if cost.block is None:
            return cost
        block = profile.blocks[cost.block]
        arrive, leave = block.parameters_nbytes / max(into), block.gradient_nbytes / max(out)
        return replace(
            cost,
            block=None,
            forward_seconds=max(cost.forward_seconds, arrive),
            record_seconds=max(cost.recorded_seconds, arrive),
            backward_seconds=max(cost.backward_seconds, arrive, leave),
        )

    if isinstance(profile.stages, UniformStages):
        equal = UniformStages(slowed(profile.stages.cost), len(profile))
        return replace(profile, stages=equal, blocks=())
    return replace(profile, stages=tuple(map(slowed, profile.stages)), blocks=())


def _target(machine: Machine | None, tier: Tier | str | None) -> Tier | None:
    if tier is None and machine is not None:
        below = fastest_below(machine)
        if not {(DEVICE, below), (below, DEVICE)} <= machine.links.keys():
            return None
    return direct_tier(NAME, machine, tier)


@dataclass(slots=True)
class _Best:
    """The fastest schedule so far, by the judge."""

    profile: Profile
    budget: Budget
    machine: Machine | None
    root: Node | None = None
    seconds: float = inf
    bound: float = 0.0
    bound_unmoved: float = 0.0  # without copies
    refusals: list[BudgetError] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether anything faster may exist."""
        return self.seconds > self.bound * (1 + 1e-9)

    @property
    def open_unmoved(self) -> bool:
        """Whether anything faster may exist that moves nothing."""
        return self.open and self.seconds > self.bound_unmoved * (1 - 1e-9)

    def consider(self, root: Node) -> bool:
        """Whether it fits; kept if it is the fastest so far."""
        judged = simulate(Schedule(root, len(self.profile)), self.profile, self.machine)
        fits = is_within(judged, self.budget)
        if fits and judged.makespan_seconds < self.seconds:
            self.root, self.seconds = root, judged.makespan_seconds
        return fits

    def first(self, timed: Iterable[tuple[float, Node]]) -> None:
        """Trees, fastest first: as many as may be faster than what there is, up to the first that fits."""
        for seconds, root in timed:
            if seconds > self.seconds * (1 + 1e-9) or self.consider(root):
                return

    def fastest(self, candidates: Iterable[Candidate]) -> None:
        """Candidates, the least computation first: all that may be faster than what there is."""
        limit = self.budget.device_nbytes
        for candidate in candidates:
            if candidate.seconds > self.seconds * (1 + 1e-9):
                return
            if limit is None or candidate.nbytes <= limit:
                self.consider(candidate.root)

    def attempt(self, plan: Callable[..., Schedule]) -> None:
        """Another planner's schedule, if it applies."""
        try:
            self.consider(plan(self.profile, self.budget, self.machine).root)
        except BudgetError as error:
            self.refusals.append(error.to_keep())
        except InputError:
            pass

    def schedule(self, tier: Tier | str | None, moves: Moves) -> Schedule:
        """The result. Raises BudgetError, with the least budget that any planner names, when there is none."""
        if self.root is not None:
            return Schedule(self.root, len(self.profile), planner=NAME)
        for planner in (rotor, least_peak, superneurons, *((offload,) if moves != "none" else ())):
            self.attempt(planner.plan)
        least = min(self.refusals, key=lambda error: inf if error.least_nbytes is None else error.least_nbytes)
        raise BudgetError(
            f"{NAME}: no schedule fits; the leanest: {least}", least_nbytes=least.least_nbytes, stage=least.stage
        )


@dataclass(frozen=True, slots=True)
class Competitor:
    """Another planner that competes. ``timed``: its trees for unequal stages, fastest first; without it ``plan`` is
    asked for them too, and refuses what it is not for. ``moves``: only with a tier below. ``longest``: in stages."""

    plan: Callable[..., Schedule]
    timed: Callable[[Profile], Iterable[tuple[float, Node]]] | None = None
    moves: bool = False
    longest: float = inf


COMPETITORS: tuple[Competitor, ...] = (
    Competitor(periodic.plan, periodic.timed),
    Competitor(revolve.plan, revolve.timed),
    Competitor(online.plan, online.timed, longest=ONLINE),
    Competitor(double.plan, moves=True, longest=_JUDGED),
    Competitor(async_multistage.plan, moves=True, longest=_JUDGED),
    Competitor(least_peak.plan, longest=_LONG),
    Competitor(bisection.plan, longest=_LONG),
)
"""In the order in which they are asked; `superneurons` and `offload` follow, candidate by candidate."""


def _others(best: _Best, target: Tier | None) -> None:
    """Every other planner, as far as it may still be faster."""
    profile, n, equal = best.profile, len(best.profile), is_equal(best.profile)
    for other in COMPETITORS:
        if n > other.longest or (other.moves and target is None):
            continue
        if not (best.open if other.moves else best.open_unmoved):
            continue
        if other.timed is None or equal:
            best.attempt(other.plan)
        elif n <= _LONG:
            best.first(other.timed(profile))
    if n <= _LONG and best.open:
        best.fastest(superneurons.candidates(profile, target))
    if n <= _LONG and best.open and target is not None:
        best.fastest(offload.candidates(profile, target))


def is_equal(profile: Profile) -> bool:
    """Whether all stages cost the same."""
    stages = profile.stages
    return isinstance(stages, UniformStages) or all(cost == stages[0] for cost in stages)
