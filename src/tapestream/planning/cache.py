"""`PlanCache`: plans by shapes and modes; a plan for a larger shape serves slightly smaller ones."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

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
class Prepared:
    """All that a call needs to know: the plan, what is run by it (see `fused`), the last state as a template, and of
    what is run those stages that are once, and those whose saved tensors move."""

    plan: Plan
    run: Shorter
    output: State
    leaves: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]
    once: frozenset[int]
    moving: Container[int]

    @property
    def reaches_leaves(self) -> bool:
        """Whether any stage gives a gradient to a parameter or captured tensor."""
        return bool(self.leaves)


class PlanCache:
    """Plans that one handle has made, newest last."""

    def __init__(self) -> None:
        self._prepared: ByShape[Prepared] = ByShape()
        self.last: Plan | None = None

    def find(self, state: State, mode: object, device: torch.device, *, live: object = 0) -> Prepared | None:
        """A plan for this input, or for one of the same kind that is a little larger in every dimension.

        ``live``: bytes of the budget, of each tier, that other calls of the same handle hold now.
        """
        found = self._prepared.find(key_of(state, mode, device, live), shapes_of(state))
        self.last = self.last if found is None else found.plan
        return found

    def add(
        self,
        state: State,
        mode: object,
        device: torch.device,
        plan: Plan,
        stages: Sequence[Stage],
        traits: Sequence[Traits],
        output: State,
        *,
        live: object = 0,
        fusing: bool = True,
    ) -> Prepared:
        """Remember a new plan and what belongs to it. ``fusing``: stages may be run as one (see `fused`)."""
        leaves = {id(leaf): leaf for trait in traits for leaf in trait.leaves}
        # Only the structure of the last state is needed: its bytes must not stay.
        bare = State(
            tuple(t.new_empty(0) for t in output.tensors),
            output.requires,
            output.others,
            output.slots,
            output.spec,
        )
        run = Shorter(plan.schedule, [*stages], [*traits])
        if fusing and not Autocast.capture(device).enabled:  # where each stage casts its weights by itself
            reading = {k for k, cost in enumerate(plan.profile.stages) if cost.reads_input}
            run = fused(*run, reading)
        once, moving = run_once(run.schedule), moved_saved(run.schedule)
        prepared = Prepared(plan, run, bare, tuple(leaves.values()), shapes_of(state), once, moving)
        self._prepared.add(key_of(state, mode, device, live), prepared.shapes, prepared)
        self.last = plan
        return prepared

    def clear(self) -> None:
        """Forget all plans."""
        self._prepared.clear()


def shapes_of(state: State) -> tuple[torch.Size, ...]:
    """The shapes of its tensors."""
    return tuple(t.shape for t in state.tensors)


def key_of(state: State, mode: object, device: torch.device, live: object = 0) -> object:
    """Hashable: all that must be equal, besides shapes, for a plan to serve."""
    kinds = tuple((t.dtype, t.dim(), t.device) for t in state.tensors)
    others = tuple((type(o).__name__, _looks(o)) for o in state.others)
    return kinds, state.requires, others, state.slots, str(state.spec), mode, Autocast.capture(device), live


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
