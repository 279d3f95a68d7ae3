"""Leaves of states and outputs that carried no gradient in the first steps, and may begin to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapestream.executor.loop.form import Form
from tapestream.executor.loop.traits import Beginning, Body, StepTraits


@dataclass(slots=True)
class Late:
    """``states`` and ``outputs``: places of leaves that have carried none so far, and could."""

    states: set[int]
    outputs: set[int]
    beginning: Beginning | None = None

    @classmethod
    def of(cls, body: Body) -> "Late":
        """Before the first step."""
        sink, traits = body.sink, body.traits
        states, outputs = set[int](), set[int]()
        if sink is not None and sink.differentiable and sink.form is not None:
            outputs = _could(sink.form, traits.outputs_require)
        if body.beginning is not None:
            states = _could(body.form, traits.requires)
            if states and not body.beginning.due():
                states = set()
        return cls(states, outputs, body.beginning)

    def __bool__(self) -> bool:
        return bool(self.states or self.outputs)

    def of_state(self, traits: StepTraits, leaves: Sequence[Any]) -> StepTraits:
        """The traits, with leaves of a state that carry a gradient."""
        found = [i for i in self.states if leaves[i].requires_grad]
        if not found:
            return traits
        self.states.difference_update(found)
        self.begun()
        return replace(traits, requires=_with(traits.requires, found))

    def of_output(self, traits: StepTraits, leaves: Sequence[Any]) -> StepTraits:
        """The traits, with leaves of an output that carry a gradient."""
        found = [i for i in self.outputs if leaves[i].requires_grad]
        if not found:
            return traits
        self.outputs.difference_update(found)
        return replace(traits, outputs_require=_with(traits.outputs_require, found))

    def begun(self) -> None:
        """From now on, each call's states are watched."""
        if self.beginning is not None:
            self.beginning.found = True


def _could(form: Form, requires: tuple[bool, ...]) -> set[int]:
    tensors = (i for i, part in enumerate(form.parts) if part.kind is torch.Tensor and not requires[i])
    return {i for i in tensors if form.parts[i].dtype.is_floating_point or form.parts[i].dtype.is_complex}


def _with(mask: tuple[bool, ...], places: Sequence[int]) -> tuple[bool, ...]:
    return tuple(was or i in places for i, was in enumerate(mask))
