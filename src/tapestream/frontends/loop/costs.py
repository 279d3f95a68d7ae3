"""What a step costs: bytes and seconds, measured on the loop's own executor."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import tensor_nbytes
from tapestream.accelerator.streams import timed
from tapestream.capture.buffers import held
from tapestream.costs import StageCost
from tapestream.errors import GradientError
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.traits import Body, Source, StepTraits, Sweep
from tapestream.planning.profile import undisturbed
from tapestream.runner.ambient import as_recompute
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.graph import next_sequence_number
from tapestream.runner.guards import hooks_off
from tapestream.runner.hooks import backward_hooks_off
from tapestream.runner.modes import unhooked
from tapestream.runner.nesting import covering
from tapestream.runner.stage import Stage
from tapestream.runner.state import storages
from tapestream.storage.meter import MemoryWatch, watch_memory
from tapestream.system.collector import collector_off

# These count where a budget is one of RAM.
_TENSOR_NBYTES = 700
"""What a tensor takes beside its numbers: the Python object, the C++ object and malloc's share."""
_NODE_NBYTES = 450
"""What a node of an autograd graph takes, its edges included."""
_GENERATORS_NBYTES = {True: 5_300, False: 0}
_SAMPLES = 2
"""The faster one counts: nothing may disturb both. Numbers of steps, not seconds: what is run is the same each time."""
_MOST_STEPS = 4
_SAMPLE_NBYTES = 2**20


@dataclass(frozen=True, slots=True)
class StepCost(StageCost):
    """Of a stage of one step. ``between_nbytes``: what a stage of several holds of the state between two of them; not
    all, if backward does not read it."""

    between_nbytes: int = 0

    def of(self, steps: int) -> StageCost:
        """The cost of a stage of so many steps."""
        own = {field.name: getattr(self, field.name) for field in fields(StageCost)}
        return replace(
            StageCost(**own),
            forward_seconds=self.forward_seconds * steps,
            backward_seconds=self.backward_seconds * steps,
            record_seconds=self.recorded_seconds * steps,
            saved_nbytes=self.saved_nbytes * steps + self.between_nbytes * (steps - 1),
        )


@covering()
@unhooked()
@as_recompute()
@collector_off()
def cost_of(
    stage: Stage, body: Body, state: Any, steps: int | None, make: Callable[..., TensorSteps] = TensorSteps,
    *, ended: Callable[[Any], bool] | None = None,
) -> StepCost:  # fmt: skip
    """The cost of one step from ``state``: that after the loop's first step, or its first if it has one step alone.

    No step is run past the last of ``steps``, nor from a state that ``ended`` accepts: it may not be possible. The step
    is evaluated twice to measure its bytes (once more where it differentiates inside), two in a row once, then
    `_SAMPLES` times its first four for their seconds, and as often so many as save a MiB at most, to be recorded.
    Bytes on the CPU count what Python and autograd keep beside the numbers, most of it for tiny states. Generators,
    buffers and gradients are afterwards as before. ``make`` makes the executor's part, whose stages are of
    ``body.chunk`` steps: the cost is their share.
    """
    device, chunk = body.device, body.chunk
    if body.source is not None:
        body = replace(body, source=_Unheard(body.source))
    number = 0 if steps is not None and steps < 2 * chunk else 1
    most = chunk * max(1, (_MOST_STEPS if steps is None else min(steps - 1, _MOST_STEPS)) // chunk)
    traits = body.traits
    unchanged = undisturbed((stage,), device, traits.generators, traits.cells)
    off = reentrant_checkpointing_off()
    with unchanged, off, hooks_off(traits.leaves), watch_memory(device) as watch:
        runner = make(body, None)
        runner.first_run = False
        own, state = runner.keeper.own, runner.detached(state)
        _reversed(runner, own(state), number, watch)  # the process may never have run such kernels
        cost, one_nbytes = _reversed(runner, own(state), number, watch)
        if traits.sweep is Sweep.GRAPH:  # a sweep takes more than a bare step
            with watch.measured() as sweeping:
                runner.sweep(own(state), number, number + 1, ended)
            extra = max(0, sweeping.peak_nbytes - cost.output_nbytes)
            cost = replace(cost, forward_extra_nbytes=extra, record_extra_nbytes=cost.forward_extra_nbytes)
        between = cost.output_nbytes
        if most >= 2 * chunk and not ended:
            two = make(replace(body, chunk=2 * chunk), None)
            between = _between_nbytes(two, own(state), between, one_nbytes, watch)
        with watch.paused(), backward_hooks_off(stage.modules):
            sweep = partial(timed, device, lambda: runner.sweep(own(state), 0, most, ended))
            seconds = min(sweep()[0] for _ in range(_SAMPLES)) / runner.reached
            found = cost.recorded_seconds, cost.backward_seconds
            several = 1 if ended else max(1, min(most, _SAMPLE_NBYTES // max(1, cost.saved_nbytes)) // chunk)
            if several > 1:  # what a stage takes beside its steps is little in one of many
                runner, number = make(replace(body, chunk=several * chunk), None), 0
                runner.first_run = False
            with suppress(GradientError):  # the loop itself will say so, where it comes to that step
                found = _fastest_reversal(runner, lambda: own(state), number)
    beside = _beside_nbytes(body, state)
    cost = replace(
        cost,
        forward_seconds=seconds,
        backward_seconds=found[1] / runner.body.chunk,
        record_seconds=found[0] / runner.body.chunk,
        saved_nbytes=-(-cost.saved_nbytes // chunk),
        output_nbytes=cost.output_nbytes + beside,
        between_nbytes=between + (beside if between else 0),
    )
    return _with_more(cost, traits)


def _beside_nbytes(body: Body, state: Any) -> int:
    """What goes with a state: buffers and cells that steps write into; on the CPU, Python's objects and generators."""
    traits, leaves = body.traits, [leaf for leaf in body.form.leaves(state) if isinstance(leaf, torch.Tensor)]
    written = (held(slot) for slot in traits.buffers)
    buffers = sum(tensor_nbytes(buffer) for buffer in written if isinstance(buffer, torch.Tensor))
    objects = _TENSOR_NBYTES * (len(leaves) + 1) + _GENERATORS_NBYTES[traits.draws_torch]
    cells = sum(cell.nbytes for cell in traits.cells)
    return buffers + cells + (0 if is_accelerator(body.device) else objects)


def _with_more(cost: StepCost, traits: StepTraits) -> StepCost:
    """With what steps leave: by the last one that ran, and by the one before backward, which backward puts back (see
    `TensorCall`); once more while a call looks at its first steps, and compares what they leave: the graph of one, and
    a few states, beside that of the next. With a copy of a state that steps write into."""
    left = 3 * traits.left_nbytes + (cost.saved_nbytes + 4 * cost.output_nbytes) * traits.left_graph
    left += cost.output_nbytes * bool(traits.mutates)
    recording = cost.forward_extra_nbytes if cost.record_extra_nbytes is None else cost.record_extra_nbytes
    return replace(
        cost,
        forward_extra_nbytes=cost.forward_extra_nbytes + left,
        record_extra_nbytes=recording + left,
        backward_extra_nbytes=cost.backward_extra_nbytes + left,
    )


class _Unheard:
    """Inputs, whose gradients are those of a measurement and of no use."""

    def __init__(self, source: Source) -> None:
        self.differentiable, self.read, self.fresh = source.differentiable, source.read, source.fresh

    def add(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Drop them."""


def _reversed(runner: TensorSteps, state: Any, number: int, watch: MemoryWatch) -> tuple[StepCost, int]:
    """Record and reverse one step, measured; and the bytes of its record and its state."""
    before = next_sequence_number()
    with watch.measured() as recording:
        seconds, (out, tape) = timed(watch.device, lambda: runner.record([state], number, output_needed=True))
    nodes = 0 if is_accelerator(watch.device) else next_sequence_number() - before
    inputs, outputs = _storages(runner, state), _storages(runner, out)
    output_nbytes = sum(nbytes for address, nbytes in outputs.items() if address not in inputs)
    cotangents = _cotangents(runner, out, tape)
    made = sum(tensor_nbytes(g) for g in cotangents if g is not None)
    with watch.measured() as reversing:
        backward_seconds, found = timed(watch.device, lambda: runner.backward(tape, number, cotangents))
    returned = sum(storages([g for g in found if g is not None]).values())  # may be more than they show
    cost = StepCost(
        forward_seconds=0.0,
        backward_seconds=backward_seconds,
        output_nbytes=output_nbytes,
        saved_nbytes=max(0, recording.end_nbytes - output_nbytes) + _NODE_NBYTES * nodes,
        record_seconds=seconds,
        forward_extra_nbytes=max(0, recording.peak_nbytes - recording.end_nbytes),
        backward_extra_nbytes=max(0, reversing.peak_nbytes - returned) + max(0, made - max(output_nbytes, returned)),
        cotangent_nbytes=returned if returned > output_nbytes else None,
    )
    return cost, recording.end_nbytes


def _between_nbytes(runner: TensorSteps, state: Any, state_nbytes: int, one_nbytes: int, watch: MemoryWatch) -> int:
    """What the record of two stages in one holds of the state between them, ``state_nbytes`` at most; that of one, with
    the state that it makes, takes ``one_nbytes``."""
    runner.first_run = False
    try:
        with watch.measured() as meter:
            made = runner.record([state], 0, output_needed=True)
        del made
    except GradientError:  # the loop itself will say so, where it comes to that step
        return state_nbytes
    return min(state_nbytes, max(0, meter.end_nbytes - 2 * one_nbytes + state_nbytes))


def _fastest_reversal(runner: TensorSteps, state: Callable[[], Any], number: int) -> tuple[float, float]:
    """Seconds to record a stage of small steps and to reverse it."""
    device = runner.body.device
    recording = reversing = float("inf")
    for _ in range(_SAMPLES):
        seconds, (out, tape) = timed(device, lambda: runner.record([state()], number, output_needed=True))
        recording = min(recording, seconds)
        given = _cotangents(runner, out, tape)
        seconds, _ = timed(device, partial(runner.backward, tape, number, given))
        reversing = min(reversing, seconds)
    return recording, reversing


def _cotangents(runner: TensorSteps, out: Any, tape: Any) -> list[torch.Tensor | None]:
    """Ones for each of a step's results that has a gradient."""
    leaves = zip(runner.form.leaves(out), tape.edges, strict=True)
    return [torch.ones_like(leaf) if edge is not None else None for leaf, edge in leaves]


def _storages(runner: TensorSteps, state: Any) -> dict[int, int]:
    return storages([leaf for leaf in runner.form.leaves(state) if isinstance(leaf, torch.Tensor)])
