"""What the executor is told about one loop: its step, its inputs and outputs, and what watching one step has shown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from tapestream.capture.buffers import Slot
from tapestream.capture.cells import Cell
from tapestream.executor.loop.form import Form


class Sweep(Enum):
    """How steps run that keep nothing."""

    PLAIN = "under no_grad, which gives the same bits"
    HOOKS = "with gradients on, saving nothing"
    GRAPH = "with gradients on, its graph dropped when it ends, since it differentiates something itself"


@dataclass(frozen=True, slots=True)
class StepTraits:
    """One step. Tuples go by leaf of the state.

    ``requires_first`` / ``requires``: which leaves of state 0 and of later states carry a gradient. ``mutates``: leaves
    that the step writes into. ``guarded``: its inputs need guards (it writes into them, or a graph outlives it).
    ``makes_leaves``: its graph ends at leaves made inside, too. ``generators``: objects from which it may draw, beside
    the global ones. ``buffers`` and ``cells``: what it writes into; ``leaves_behind``: it sets more than these,
    which backward finds and leaves as the last step has set it; ``left_nbytes``: bytes of tensors there;
    ``left_graph``: whether one has a graph. ``leaves``: tensors that may get a gradient from it beside state and input;
    ``stand_ins``: by place in ``leaves``, the dtype in which a leaf stands in for that tensor while a step is recorded:
    tensors computed before the loop (a backward through what made them must happen once, afterwards), and weights that
    autocast casts. ``aliases``: pairs (leaf of the output, leaf of the new state) that are one tensor. ``nodes``: those
    of its graph. ``outputs_require``: which leaves of outputs carry a gradient.
    ``used_again``: places in ``leaves`` of those that one step uses more than once; ``state_used_again``: leaves of
    state 0 that the first step does.
    """

    sweep: Sweep
    requires_first: tuple[bool, ...]
    requires: tuple[bool, ...]
    mutates: frozenset[int] = frozenset()
    guarded: bool = False
    makes_leaves: bool = False
    draws_host: bool = False
    draws_torch: bool = False
    generators: tuple[Any, ...] = ()
    buffers: tuple[Slot, ...] = ()
    cells: tuple[Cell, ...] = ()
    leaves_behind: bool = False
    left_nbytes: int = 0
    left_graph: bool = False
    leaves: tuple[torch.Tensor, ...] = ()
    stand_ins: tuple[tuple[int, torch.dtype], ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()
    nodes: int = 1
    outputs_require: tuple[bool, ...] = ()
    used_again: frozenset[int] = frozenset()
    state_used_again: frozenset[int] = frozenset()

    @classmethod
    def bare(cls, form: Form) -> "StepTraits":
        """Those of a step of which no gradient is wanted."""
        none = (False,) * len(form.parts)
        return cls(Sweep.PLAIN, none, none)


class Source(Protocol):
    """Where a step's second argument comes from."""

    differentiable: bool

    def read(self, start: int, stop: int) -> Iterable[Any]:
        """The inputs of steps start .. stop-1, without a graph."""

    def fresh(self, x: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """``x`` with leaves in place of its tensors that get a gradient, and these."""

    def add(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of what `fresh` gave for this step."""


class Sink(Protocol):
    """What becomes of a step's outputs. ``early``: their cotangents come before any other, as those of a stack do.
    ``differentiable``: gradients flow through them."""

    form: Form | None
    early: bool
    differentiable: bool

    def wants(self, step: int) -> bool:
        """Whether this step's output counts."""

    def add(self, step: int, output: Any) -> None:
        """Take an output, the first time that the step runs."""

    def cotangents(self, step: int) -> Sequence[torch.Tensor | None]:
        """By leaf of the output; empty where no gradient arrived."""


@dataclass(slots=True)
class Beginning:
    """Of steps of one kind: whether leaves of the state have ever begun late, and in how many calls that was asked.

    To see it in a call, its forward runs with gradients on. Where nothing was found, ever fewer calls do.
    """

    found: bool = False
    calls: int = 0

    def due(self) -> bool:
        """Whether to look at this call's states."""
        self.calls += 1
        return self.found or not self.calls & (self.calls - 1)


@dataclass(frozen=True, slots=True)
class Body:
    """The loop itself: ``function`` is called with the state, and with an input where there is a source.
    ``beginning``: says whether states are watched for leaves that begin to carry a gradient."""

    function: Callable[..., Any]
    form: Form
    traits: StepTraits
    source: Source | None
    sink: Sink | None
    device: torch.device
    chunk: int = 1
    beginning: Beginning | None = None
