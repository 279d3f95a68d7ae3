"""`JointRunner`: stages that several micro-batches pass one after the other, before any of them goes on."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from tapestream.executor.accumulation import is_held
from tapestream.executor.segments import Sums
from tapestream.runner.guards import Pack, Unpack
from tapestream.runner.runner import Gradients, Runner
from tapestream.runner.stage import Stage
from tapestream.runner.state import State, overlaps

T = TypeVar("T")
Within = Callable[[int, Callable[[], State]], State]
"""Calls a function where the forward of a micro-batch (by its number) runs."""


@dataclass(slots=True)
class JointTape:
    """A stage whose backward runs it again, micro-batch by micro-batch. ``states``: of each, what the stage was given;
    ``inputs``: one entry for each tensor in them."""

    states: list[State]
    inputs: Sequence[object]


class JointRunner:
    """A `Runner` of states that hold those of all micro-batches, one after the other.

    A stage saves nothing for its backward: that runs it again for one micro-batch, differentiates it, and goes on to
    the next. So the saved tensors of one are held at a time, and gradients of parameters are added in the order of the
    micro-batches, as plain PyTorch adds them to ``.grad``.
    """

    def __init__(self, stages: Sequence[Stage], runners: Sequence[Runner], within: Within) -> None:
        """``runners``: one for each micro-batch; ``within``: where a stage's first run for one of them is to run."""
        self.stages, self.runners, self._within = stages, runners, within
        self.hooks: Callable[[int], tuple[Pack, Unpack] | None] | None = lambda k: None  # nothing saved ever moves
        self.inside: dict[int, Any] = {}
        self._structure: dict[int, list[State]] = {}  # of each state, by micro-batch, without tensors

    def joined(self, k: int, states: Sequence[State]) -> State:
        """State ``k`` of all micro-batches."""
        self._structure[k] = [replace(state, tensors=()) for state in states]
        tensors = tuple(t for state in states for t in state.tensors)
        return State(tensors, tuple(r for state in states for r in state.requires), (), (), states[0].spec)

    def structures(self, k: int) -> Sequence[State]:
        """State ``k`` of each micro-batch, without its tensors."""
        return self._structure[k]

    def parted(self, k: int, tensors: Sequence[T]) -> list[list[T]]:
        """What belongs to each micro-batch, of one for each tensor of state ``k``."""
        found, rest = [], list(tensors)
        for structure in self._structure[k]:
            width = len(structure.requires)
            found.append(rest[:width])
            del rest[:width]
        return found

    def forward(self, k: int, states: list[State], *, keep_inside: bool = False) -> State:
        """As `Runner.forward`."""
        assert not keep_inside
        return self._forward(k, self._taken(k, states))

    def record(self, k: int, states: list[State], *, output_needed: bool = True) -> tuple[State | None, JointTape]:
        """Run stage ``k`` where its output is needed, and keep what it was given."""
        parts = self._taken(k, states)
        out = self._forward(k, [*parts]) if output_needed else None
        return out, JointTape(parts, [None] * sum(len(part.tensors) for part in parts))

    def backward(
        self, k: int, tape: JointTape, cotangents: Gradients, sums: Sums, begun: Gradients | None = None
    ) -> tuple[Gradients, list[tuple[torch.Tensor, torch.Tensor]]]:
        """As `Runner.backward`. ``tape`` and ``cotangents`` are emptied on the way."""
        assert not sums
        assert not begun
        given: Gradients = []
        totals: Sums = {}
        parts = self.parted(k + 1, cotangents)
        cotangents.clear()
        for runner, part in zip(self.runners, parts, strict=True):
            state = tape.states.pop(0)
            if all(cotangent is None for cotangent in part):
                given += [None] * len(state.tensors)
                continue
            states = [state]
            del state
            _, own = runner.record(k, states, output_needed=False)
            found, pairs = runner.backward(k, own, part, {})
            del own
            part.clear()
            given += found
            _add(totals, pairs)
        return given, list(totals.values())

    def forget(self, k: int) -> None:
        """As `Runner.forget`."""
        for runner in self.runners:
            runner.forget(k)

    def _taken(self, k: int, states: list[State]) -> list[State]:
        """The states of the micro-batches, of the only one of ``states``, which is emptied."""
        parts = self.parted(k, states.pop().tensors)
        return [replace(s, tensors=tuple(part)) for s, part in zip(self._structure[k], parts, strict=True)]

    def _forward(self, k: int, parts: list[State]) -> State:
        made = []
        for number, runner in enumerate(self.runners):
            states = [parts.pop(0)]
            if k in runner.seen:
                made.append(runner.forward(k, states))
            else:
                made.append(self._within(number, lambda: runner.forward(k, states)))  # noqa: B023
        return self.joined(k + 1, made)


def _add(totals: Sums, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """What autograd does with gradients that reach leaves. ``pairs`` is emptied."""
    while pairs:
        leaf, gradient = pairs.pop()
        if id(leaf) in totals:
            with torch.no_grad():
                totals[id(leaf)][1].add_(gradient)
        elif is_held(gradient, sys.getrefcount(gradient)) or overlaps(gradient):
            totals[id(leaf)] = leaf, gradient.clone()
        else:
            totals[id(leaf)] = leaf, gradient
