"""Steps that take more than the first ones did: found in the call itself, before its budget is used up."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import tensor_nbytes
from tapestream.capture.buffers import BufferSnapshot, held
from tapestream.capture.cells import Contents
from tapestream.costs import StageCost
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.traits import Body
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.known import Cost
from tapestream.ir.actions import PhaseKind
from tapestream.planning.exceeded import Exceeded, limit_of
from tapestream.planning.plan import Plan
from tapestream.runner.ambient import HostGenerators, TorchGenerators
from tapestream.runner.state import storages
from tapestream.storage.meter import profiling, watch_memory
from tapestream.units import format_nbytes

_MOST_RECORDS = 16
"""So many of a plan's first call are measured, then those whose number is a power of two."""
_GENERATORS_NBYTES = 5_100
_MOST_PLANS = 64
_UNKNOWN_STEPS = 100
"""Of a run whose length is not known."""
_SECONDS_OF_A_MEASUREMENT, _SECONDS_OF_A_NODE, _SHARE = 4e-4, 1e-5, 0.002


def forward_seconds(plan: Plan) -> float:
    """Of a call, whose backward may never run."""
    return plan.simulation.phase_seconds[PhaseKind.FORWARD]


@dataclass(slots=True)
class Growth:
    """What recorded stages of one call take, beside what was planned: the most that was measured.

    ``stage``: what was planned for one; ``planned_nbytes``: for the whole call, within ``limit_nbytes``; ``cost``: of a
    step, from which that follows. ``first``: many stages are measured; else the first. ``strict``: what backward finds
    is an error.
    """

    stage: StageCost
    planned_nbytes: int
    limit_nbytes: int
    cost: Cost
    device: torch.device
    first: bool
    strict: bool
    exceeded: Exceeded
    kept_nbytes: int = field(default=0, init=False)
    step: int = field(default=0, init=False)
    _records: int = field(default=0, init=False)

    @classmethod
    def of(
        cls, task: Task, cost: Cost, planned: tuple[StageCost, int, float], limit: int | None, exceeded: Exceeded,
        *, strict: bool,
    ) -> "Growth | None":  # fmt: skip
        """Of a call for which a stage, bytes and seconds of its forward are ``planned``: the first with that cost, and
        of the others as many as take no time; None for the rest."""
        if limit is None or task.runner is not TensorSteps:
            return None
        stage, nbytes, seconds = planned
        first = planned not in cost.unmeasured
        unmeasured = cost.unmeasured.get(planned, 0.0) + (seconds or _UNKNOWN_STEPS * stage.recorded_seconds)
        steps = max(1.0, stage.recorded_seconds / max(1e-9, cost.step.recorded_seconds))
        takes = _SECONDS_OF_A_MEASUREMENT + _SECONDS_OF_A_NODE * task.body.traits.nodes * steps
        if not first and unmeasured * _SHARE < takes:
            cost.unmeasured[planned] = unmeasured
            return None
        if len(cost.unmeasured) > _MOST_PLANS:
            cost.unmeasured.clear()
        cost.unmeasured[planned] = 0.0
        return cls(stage, nbytes, limit, cost, task.body.device, first, strict, exceeded)

    def due(self) -> bool:
        """Whether to measure the next one. Not where the user measures."""
        self._records += 1
        k, most = self._records, _MOST_RECORDS if self.first else 1
        return (k <= most or (self.first and not k & (k - 1))) and (is_accelerator(self.device) or not profiling())

    def measured(self, step: int, nbytes: int) -> None:
        """The stage that ends with ``step`` took this beside the state that it makes."""
        if nbytes > self.kept_nbytes:
            self.kept_nbytes, self.step = nbytes, step

    @property
    def _stage_nbytes(self) -> int:
        return self.stage.saved_nbytes + self.stage.recorded_extra_nbytes

    @property
    def held_nbytes(self) -> int:
        """What the call holds at its peak, by what was measured."""
        return self.planned_nbytes + max(0, self.kept_nbytes - self._stage_nbytes)

    @property
    def exceeds(self) -> bool:
        """Whether that is more than the budget."""
        return self.held_nbytes > limit_of(self.limit_nbytes)

    def learn(self) -> None:
        """From now on, steps cost what the largest of these does."""
        self.cost.unmeasured.clear()
        self.cost.step = self.cost.step.taking(self.kept_nbytes / max(1, self._stage_nbytes))

    def begin_again(self, task: Task, before: "Before | None") -> Task | None:
        """The task to be run once more, with all as it was ``before``, and what steps cost known. None where that is
        not kept, or a function of the user has been given outputs: it would be given them twice, so the call goes on,
        and says what it holds."""
        sink = task.sink
        if before is None or (sink is not None and callable(sink.how)):
            self.end()
            return None
        self.learn()
        before.put_back()
        if sink is None:
            return task
        sink = sink.afresh()
        return replace(task, sink=sink, body=replace(task.body, sink=sink))

    def end(self) -> None:
        """Say what was found, once, and plan for it from now on."""
        if self.exceeds:
            held, holder = self.held_nbytes, f"{self.said}; later calls are planned for that"
            self.learn()
            self.planned_nbytes, self.stage = 0, replace(self.stage, saved_nbytes=self.kept_nbytes)
            self.exceeded.say(held, self.limit_nbytes, holder, strict=self.strict)

    @property
    def said(self) -> str:
        """For messages: what was found."""
        return (
            f"the stage that ends with step {self.step} keeps {format_nbytes(self.kept_nbytes)} for its backward, the "
            f"first one {format_nbytes(self._stage_nbytes)}"
        )

    @property
    def steps(self) -> Callable[..., TensorSteps]:
        """Makes the executor's part of a call, measured."""
        return partial(_MeasuredSteps, self)


class _MeasuredSteps(TensorSteps):
    def __init__(
        self, growth: Growth, body: Body, steps: int | None, tick: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(body, steps, tick)
        self._growth = growth

    def record(self, live: list[Any], stage: int, *, output_needed: bool) -> tuple[Any, Any]:
        growth = self._growth
        if not growth.due():
            return super().record(live, stage, output_needed=output_needed)
        before = storages(self._tensors(live[0]))
        with watch_memory(self.body.device) as watch, watch.measured() as meter:
            found = super().record(live, stage, output_needed=output_needed)
        made = storages(self._tensors(found[0]))
        output = sum(nbytes for address, nbytes in made.items() if address not in before)
        growth.measured(self._end(stage + 1) - 1, meter.peak_nbytes - output)
        return found

    def end_backward(self) -> None:
        self._growth.end()

    def _tensors(self, state: Any) -> list[torch.Tensor]:
        return [leaf for leaf in self.form.leaves(state) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Before:
    """What a call of a loop changes, as it was before it: for one that has to begin again."""

    buffers: BufferSnapshot
    contents: Contents
    generators: tuple[TorchGenerators, HostGenerators] | None

    @classmethod
    def take(cls, body: Body, room_nbytes: int) -> "Before | None":
        """As it is now; None where the copies take more than ``room_nbytes``."""
        traits = body.traits
        draws = traits.draws_torch or traits.draws_host
        nbytes = sum(tensor_nbytes(t) for slot in traits.buffers if isinstance(t := held(slot), torch.Tensor))
        nbytes += sum(cell.nbytes for cell in traits.cells) + _GENERATORS_NBYTES * draws
        if nbytes > room_nbytes:
            return None
        generators = TorchGenerators.capture(body.device), HostGenerators.capture(traits.generators)
        return cls(BufferSnapshot.take(traits.buffers), Contents.take(traits.cells), generators if draws else None)

    def put_back(self) -> None:
        """Let it be so again."""
        self.contents.put_back()
        self.buffers.put_back()
        for one in self.generators or ():
            one.restore()
