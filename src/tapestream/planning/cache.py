"""Plans are found again: by shapes and modes, where one for a larger shape serves slightly smaller ones, and by what
other calls hold of the budget."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch

from tapestream.costs import Budget, Profile
from tapestream.executor.fused import Shorter, fused
from tapestream.executor.travel.travel import moved_saved
from tapestream.ir.schedule import run_once
from tapestream.planning.plan import Plan
from tapestream.runner.ambient import Autocast
from tapestream.runner.private import may_change, tensors_in
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State

# A smaller input may use the plan of a larger one down to this share of its elements: below, a plan of its own
# recomputes less.
_SERVES_DOWN_TO = 0.75
_MOST_BESIDE = 64

T = TypeVar("T")


class ByShape(Generic[T]):
    """What was prepared for inputs of some shapes, found again for these and for slightly smaller ones of the same
    kind."""

    def __init__(self) -> None:
        self._found: dict[object, list[tuple[tuple[torch.Size, ...], T]]] = {}

    def find(self, kind: object, shapes: tuple[torch.Size, ...]) -> T | None:
        """The one of the fewest elements whose shapes are these, or a little larger in every dimension."""
        fitting = [(known, it) for known, it in self._found.get(kind, ()) if _serves(known, shapes)]
        return min(fitting, key=lambda pair: _elements(pair[0]))[1] if fitting else None

    def add(self, kind: object, shapes: tuple[torch.Size, ...], prepared: T) -> None:
        """Remember it."""
        self._found.setdefault(kind, []).append((shapes, prepared))

    def clear(self) -> None:
        """Forget everything."""
        self._found.clear()


@dataclass(frozen=True, slots=True)
class ProfiledStages:
    """What was found of the stages for inputs of one kind: what they cost and do, and the last state, without bytes."""

    profile: Profile
    traits: tuple[Traits, ...]
    output: State

    @classmethod
    def of(cls, profile: Profile, traits: Sequence[Traits], output: State) -> "ProfiledStages":
        """Only the structure of the last state is needed: its bytes must not stay."""
        bare = tuple(t.new_empty(0) for t in output.tensors)
        return cls(profile, tuple(traits), replace(output, tensors=bare))


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a call needs to know: the plan, what is run by it (see `fused`), the last state as a template, and
    tensors that get a gradient. ``several``: ids of those to which the call adds several parts; ``inputs_repeated``:
    tensors of the first state to which it does. ``once``, ``moving``: of what is run, stages that are once, and those
    whose saved tensors move."""

    plan: Plan
    run: Shorter
    output: State
    leaves: tuple[torch.Tensor, ...]
    several: frozenset[int]
    inputs_repeated: frozenset[int]
    once: frozenset[int]
    moving: Container[int]

    @classmethod
    def of(
        cls, plan: Plan, stages: Sequence[Stage], profiled: ProfiledStages, device: torch.device,
        *, repeated: frozenset[int] = frozenset(), fusing: bool = True,
    ) -> "Prepared":  # fmt: skip
        """``repeated``: see ``inputs_repeated``; ``fusing``: stages may be run as one."""
        leaves = {id(leaf): leaf for trait in profiled.traits for leaf in trait.leaves}
        uses = Counter(id(leaf) for trait in profiled.traits for leaf in trait.leaves)
        uses.update(key for trait in profiled.traits for key in trait.repeated)
        several = frozenset(key for key in leaves if uses[key] > 1)
        run = Shorter(plan.schedule, [*stages], [*profiled.traits])
        if fusing and not Autocast.capture(device).enabled:  # where each stage casts its weights by itself
            reading = {k for k, cost in enumerate(plan.profile.stages) if cost.reads_input}
            run = fused(*run, reading)
        once, moving = run_once(run.schedule), moved_saved(run.schedule)
        return cls(plan, run, profiled.output, tuple(leaves.values()), several, repeated, once, moving)

    @property
    def reaches_leaves(self) -> bool:
        """Whether any stage gives a gradient to a parameter or captured tensor."""
        return bool(self.leaves)


Live: TypeAlias = tuple[int, ...]
"""Bytes of the budget that other calls of a front end hold now, of each tier."""


class HasPlan(Protocol):
    """What was prepared by a plan."""

    @property
    def plan(self) -> Plan:
        """The plan."""


PlannedT = TypeVar("PlannedT", bound=HasPlan)


class Beside(Generic[PlannedT]):
    """What was planned beside calls that held some bytes of the budget, found again where it may serve."""

    def __init__(self) -> None:
        self._planned: dict[Live, PlannedT] = {}

    def find(self, live: Live, room: Callable[[], Budget]) -> PlannedT | None:
        """What was planned beside as much, else beside less, if it fits ``room`` now: a plan that is the fastest in
        more room is the fastest of those that fit."""
        found = self._planned.get(live)
        if found is not None or not self._planned:
            return found
        now = room()
        for then, planned in self._planned.items():
            if all(a <= b for a, b in zip(then, live, strict=True)) and _fits(planned.plan, now):
                return planned
        return None

    def add(self, live: Live, planned: PlannedT) -> None:
        """Remember it."""
        if len(self._planned) >= _MOST_BESIDE:
            self._planned.clear()
        self._planned[live] = planned


def _fits(plan: Plan, room: Budget) -> bool:
    limits = ((nbytes, room.nbytes(tier)) for tier, nbytes in plan.simulation.peak_nbytes.items())
    return all(limit is None or nbytes <= limit for nbytes, limit in limits)


@dataclass(slots=True)
class KnownInputs:
    """What is known of inputs of one kind and these shapes: what was found of the stages, and plans."""

    profiled: ProfiledStages
    beside: Beside[Prepared] = field(default_factory=Beside)

    def takes(self, times: float) -> None:
        """A call has held so many times what was planned: others are planned for stages that do."""
        profile = self.profiled.profile
        stages = tuple(cost.taking(times) for cost in profile.stages)
        self.profiled, self.beside = replace(self.profiled, profile=replace(profile, stages=stages)), Beside()


def shapes_of(state: State) -> tuple[torch.Size, ...]:
    """The shapes of its tensors."""
    return tuple(t.shape for t in state.tensors)


def key_of(state: State, mode: object, device: torch.device) -> object:
    """Hashable: all that must be equal, besides shapes, for a plan to serve."""
    kinds = tuple((t.dtype, t.dim(), t.device) for t in state.tensors)
    others = tuple((type(o).__name__, _looks(o)) for o in state.others)
    return kinds, state.requires, others, state.slots, str(state.spec), mode, Autocast.capture(device)


def _looks(thing: object) -> object:
    """What of an argument that is no tensor decides on a plan: of a cache, how full it is."""
    if not may_change(thing):
        return repr(thing)
    return tuple((t.shape, t.dtype, t.requires_grad) for t in tensors_in([thing]))


def _serves(known: tuple[torch.Size, ...], asked: tuple[torch.Size, ...]) -> bool:
    if known == asked:
        return True
    sizes = [pair for one, other in zip(asked, known, strict=True) for pair in zip(one, other, strict=True)]
    # One is not just smaller than more: it is broadcast, and squeezed.
    return all(1 < a <= k or a == k for a, k in sizes) and _elements(asked) >= _SERVES_DOWN_TO * _elements(known)


def _elements(shapes: tuple[torch.Size, ...]) -> int:
    return sum(shape.numel() for shape in shapes)
