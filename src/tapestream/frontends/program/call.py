"""One live call of a program: its first sweep, and backward by replays."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.executor.loop.driver import LoopDriver
from tapestream.executor.program.keeper import Keeper
from tapestream.executor.program.record import Record
from tapestream.executor.program.recorder import Recorder
from tapestream.executor.program.steps import ProgramSteps
from tapestream.frontends.program.orders import Reversal
from tapestream.frontends.program.results import found_in
from tapestream.planning.profile import unchanged_generators
from tapestream.runner.ambient import as_recompute
from tapestream.runner.guards import check_differentiated_once
from tapestream.runner.runner import hooks_off

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A program's first run: what it returned, what was noted of it, restart checkpoints, and by number the results
    that carry gradients."""

    result: Any
    record: Record
    keeper: Keeper
    tensors: dict[int, torch.Tensor]


def sweep(function: Callable[[], Any], record: Record, keeper: Keeper, recorder: Recorder) -> Sweep:
    """Run the program. Raises InputError and GradientError for what could not be differentiated by replays."""
    with recorder.listening():
        result = function()
    tensors: dict[int, torch.Tensor] = {}
    n = len(record)
    for tensor in found_in(result):
        number = recorder.number_of(tensor)
        if not tensor.requires_grad or (number is not None and number < 0):
            continue
        if number is None:
            if tensor.is_leaf:
                continue  # of others, returned untouched
            raise InputError(
                f"Program: the program returned a tensor of shape {tuple(tensor.shape)} that requires a gradient and "
                "that no operation inside it made; leave out of the result what was computed before"
            )
        tensors[number] = tensor
        record.last_use[number] = n
    for external in record.externals:
        external.version = external.tensor._version
    keeper.settle(record)
    return Sweep(result, record, keeper, tensors)


class Call:
    """Holds what backward needs, until it has run or nobody can ask for it. ``held`` is called once, at the end."""

    def __init__(self, found: Sweep, cuts: Sequence[int], reversal: Reversal, held: Callable[[], None]) -> None:
        self.record, self._held = found.record, held
        self.numbers = list(found.tensors)
        self._shown = _versions_of_shared(found)
        self.steps = ProgramSteps(found.record, cuts, found.keeper.device)
        self.driver: LoopDriver | None = LoopDriver(reversal.orders, self.steps)
        self.driver.forward(None)
        stage_of = {operation: stage for stage, operation in enumerate(cuts)}
        kept = found.keeper.kept
        self.driver.kept.update({stage_of[operation]: kept[operation] for operation in kept})
        self.wanted = [k for k, e in enumerate(found.record.externals) if e.tensor.requires_grad]

    def inputs(self) -> list[torch.Tensor]:
        """What the call's node hangs on."""
        return [self.record.externals[k].tensor for k in self.wanted]

    def differentiate(self, cotangents: Gradients) -> Gradients:
        """The backward phase: a gradient for each of `inputs`."""
        driver, self.driver = self.driver, None
        if driver is None:
            raise GradientError(
                "this program was differentiated a second time, but its restart checkpoints are gone after one "
                "backward (retain_graph=True is not supported); call the program again"
            )
        self._check_unchanged()
        given = {number: g for number, g in zip(self.numbers, cotangents, strict=True) if g is not None}
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_recompute())
            stack.enter_context(unchanged_generators(self.steps.device))
            stack.enter_context(hooks_off([t for t in self.inputs() if t.is_leaf]))
            driver.backward(given)
        return [self.steps.sums.get(k) for k in self.wanted]

    def _check_unchanged(self) -> None:
        for external in self.record.externals:
            if external.tensor._version != external.version:
                raise GradientError(
                    f"Program: a tensor of shape {tuple(external.tensor.shape)} that the program used was modified in "
                    "place after the program had run, so replays would use the new values; run backward before the "
                    "optimizer's step, or clone() the tensor"
                )
        for tensor, version in self._shown:
            if tensor._version != version:
                raise GradientError(
                    "Program: a result that shares its memory with another result or an argument was modified in "
                    "place, which the other's gradient would miss; return clone() of one of them"
                )

    def release(self) -> None:
        """Drop what is held, once."""
        self.driver = None
        held, self._held = self._held, _nothing
        held()

    def __del__(self) -> None:
        if getattr(self, "_held", None) is not None:
            self._held()
            self._held = _nothing


def _versions_of_shared(found: Sweep) -> list[tuple[torch.Tensor, int]]:
    record = found.record
    storages = [record.storage[number] for number in found.tensors]
    return [
        (tensor.detach(), tensor._version)
        for (number, tensor), storage in zip(found.tensors.items(), storages, strict=True)
        if storages.count(storage) > 1 or record.storage_external[storage]
    ]


class ProgramNode(torch.autograd.Function):
    """The one autograd node of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, results: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        """Nothing runs here: ``results`` come from the first sweep."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(t.detach() for t in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        """Reverse the program."""
        check_differentiated_once("this program", "call the function without Program")
        try:
            return (None, None, *ctx.call.differentiate(cotangents))
        finally:
            ctx.call.release()


def _nothing() -> None:
    return None
