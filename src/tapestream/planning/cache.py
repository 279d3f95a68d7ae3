"""`PlanCache`: plans by shapes and modes; a plan for a larger shape serves slightly smaller ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tapestream.planning.plan import Plan
from tapestream.runner.ambient import Autocast
from tapestream.runner.stage import Traits
from tapestream.runner.state import State

# A smaller input may use the plan of a larger one down to this share of its elements: below, a plan of its own
# recomputes less.
_SERVES_DOWN_TO = 0.75


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a call needs to know: the plan, the stages' traits, and the last state as a template."""

    plan: Plan
    traits: Sequence[Traits]
    output: State
    leaves: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def reaches_leaves(self) -> bool:
        """Whether any stage gives a gradient to a parameter or captured tensor."""
        return bool(self.leaves)


class PlanCache:
    """Plans that one handle has made, newest last."""

    def __init__(self) -> None:
        self._prepared: dict[object, list[Prepared]] = {}
        self.last: Plan | None = None

    def find(self, state: State, mode: object, device: torch.device, *, live: int = 0) -> Prepared | None:
        """A plan for this input, or for one of the same kind that is a little larger in every dimension.

        ``live``: bytes of the budget that other calls of the same handle hold now.
        """
        shapes = tuple(t.shape for t in state.tensors)
        fitting = [
            prepared
            for prepared in self._prepared.get(_key(state, mode, device, live), ())
            if _serves(prepared.shapes, shapes)
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda prepared: _elements(prepared.shapes))
        self.last = best.plan
        return best

    def add(
        self,
        state: State,
        mode: object,
        device: torch.device,
        plan: Plan,
        traits: Sequence[Traits],
        output: State,
        *,
        live: int = 0,
    ) -> Prepared:
        """Remember a new plan and what belongs to it."""
        leaves = {id(leaf): leaf for trait in traits for leaf in trait.leaves}
        # Only the structure of the last state is needed: its bytes must not stay.
        bare = State(
            tuple(t.new_empty(0) for t in output.tensors),
            output.requires,
            output.others,
            output.slots,
            output.spec,
        )
        shapes = tuple(t.shape for t in state.tensors)
        prepared = Prepared(plan, traits, bare, tuple(leaves.values()), shapes)
        self._prepared.setdefault(_key(state, mode, device, live), []).append(prepared)
        self.last = plan
        return prepared

    def clear(self) -> None:
        """Forget all plans."""
        self._prepared.clear()


def _key(state: State, mode: object, device: torch.device, live: int) -> object:
    kinds = tuple((t.dtype, t.dim(), t.device) for t in state.tensors)
    others = tuple((type(o).__name__, repr(o)) for o in state.others)
    return kinds, state.requires, others, state.slots, str(state.spec), mode, Autocast.capture(device), live


def _serves(known: tuple[torch.Size, ...], asked: tuple[torch.Size, ...]) -> bool:
    if known == asked:
        return True
    smaller = all(all(a <= k for a, k in zip(one, other, strict=True)) for one, other in zip(asked, known, strict=True))
    return smaller and _elements(asked) >= _SERVES_DOWN_TO * _elements(known)


def _elements(shapes: tuple[torch.Size, ...]) -> int:
    return sum(shape.numel() for shape in shapes)
