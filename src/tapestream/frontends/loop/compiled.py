"""``compile=True``: chunks of steps through ``torch.compile``, their length found by measurement."""

import os
import shutil
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.executor.loop.compiled import Chunk, CompiledSteps, unrolled
from tapestream.executor.loop.traits import Body, Sweep
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.costs import StepCost, cost_of
from tapestream.runner.modes import unhooked
from tapestream.runner.nesting import covering
from tapestream.runner.stage import Stage

LONGEST = 32
_SHARE = 0.1
"""What a call of a compiled function may take of a chunk's time, beside its steps."""
_SAMPLE_SECONDS = 0.01


class Compiler:
    """The compiled chunks of one step, each length once. ``backend``: torch.compile's."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._known: dict[tuple[object, int], Chunk] = {}

    def check(self, device: torch.device) -> None:
        """Raise InputError where torch.compile's own code generator has no C++ compiler for the CPU."""
        if self.backend == "inductor" and device.type == "cpu" and not _has_compiler():
            raise InputError(
                "Loop: compile=True was asked for, but no C++ compiler was found (looked for $CXX, c++, g++, "
                "clang++ in PATH); install one (g++, say), or leave compile out"
            )

    def chunks(self, body: Body) -> Callable[[int], Chunk]:
        """For a step with or without inputs and outputs."""
        return partial(self._chunk, body)

    def _chunk(self, body: Body, length: int) -> Chunk:
        key = (body.source is None, body.sink is None), length
        if key not in self._known:
            made: Any = unrolled(body, length)
            # The compiler remembers code, and gives up on code that it has compiled for many functions.
            made = types.FunctionType(
                made.__code__.replace(co_name=f"chunk_of_{length}"), made.__globals__, None, None, made.__closure__
            )
            compiled: Any = torch.compile(made, fullgraph=True, dynamic=False, backend=self.backend)
            self._known[key] = partial(_explained, compiled)
        return self._known[key]


def _has_compiler() -> bool:
    names = os.environ.get("CXX"), "c++", "g++", "clang++"
    return any(name is not None and shutil.which(name) is not None for name in names)


def _explained(compiled: Chunk, state: Any, xs: list[Any]) -> tuple[Any, list[Any]]:
    try:
        return compiled(state, xs)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise InputError(
            "Loop: compile=True was asked for, but torch.compile cannot take the step as one graph; leave compile out, "
            f"or change the step ({' '.join(str(error).split())[:300]})"
        ) from error


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found for one step: how many are compiled as one, how these run that keep nothing, what one costs."""

    length: int
    sweep: Sweep
    cost: StepCost


def with_chunks(task: Task, compiler: Compiler, found: Measured | None = None) -> Task:
    """The task with compiled chunks of steps, of the length found."""
    body, length = task.body, None
    if found is not None:
        body, length = replace(body, traits=replace(body.traits, sweep=found.sweep)), found.length
    return replace(task, body=body, runner=partial(CompiledSteps, chunks=compiler.chunks(body), length=length))


@covering()
@unhooked()
def measured(task: Task, stage: Stage, compiler: Compiler, count: int, chunk: int | None) -> Measured:
    """Compiles chunks and times them. ``chunk``: steps that the user wants in a stage.

    Raises InputError for a step that cannot be compiled, and where there is no C++ compiler to do it.
    """
    body = task.body
    if body.traits.stand_ins:
        raise InputError(
            "Loop: compile=True supports neither captured tensors that were computed before the loop nor autocast; "
            "pass such tensors through the state (return them unchanged), or leave compile out"
        )
    if body.traits.mutates or body.traits.sweep is Sweep.GRAPH:
        raise InputError(
            "Loop: compile=True needs a step that neither writes into its state nor differentiates inside; leave "
            "compile out"
        )
    compiler.check(body.device)
    made, chunks = with_chunks(task, compiler), compiler.chunks(body)
    # A stage longer than what is compiled consists of equal parts.
    length = min(count, chunk // -(-chunk // LONGEST) if chunk else _measured(made, chunks, count))
    sweep = _sweep(made, chunks, length)
    body = replace(body, chunk=length, traits=replace(body.traits, sweep=sweep))
    return Measured(length, sweep, cost_of(stage, body, task.later, count, made.runner))


def _measured(task: Task, chunks: Callable[[int], Chunk], count: int) -> int:
    """Steps enough for the call of a compiled function to be a small part of its time."""
    if count < 8:
        return count
    one, eight = (_seconds(task, chunks, length) for length in (1, 8))
    step = max((eight - one) / 7, 1e-7)
    call = max(0.0, one - step)
    needed = call / step / _SHARE
    return max(4, min(LONGEST, 1 << max(0, int(needed) - 1).bit_length()))


def _seconds(task: Task, chunks: Callable[[int], Chunk], length: int) -> float:
    chunk, source = chunks(length), task.body.source
    xs = [] if source is None else list(source.read(0, length))
    found: list[float] = []
    with torch.no_grad():
        chunk(task.later, xs)
        # On a machine that does other things too, a few runs may all be slow.
        while sum(found) < _SAMPLE_SECONDS or (len(found) < 20 and sum(found) < 100 * _SAMPLE_SECONDS):
            began = time.perf_counter()
            chunk(task.later, xs)
            found.append(time.perf_counter() - began)
    return min(found)


def _sweep(task: Task, chunks: Callable[[int], Chunk], length: int) -> Sweep:
    """PLAIN where the compiled chunk gives the same bits without a graph. The compiler makes two programs."""
    runner = task.runner(replace(task.body, chunk=length), None, None)
    xs = [] if task.body.source is None else list(task.body.source.read(0, length))
    generators = torch.get_rng_state()
    with torch.no_grad():
        bare, _ = chunks(length)(task.later, xs)
    torch.set_rng_state(generators)
    with torch.enable_grad():
        full, _ = chunks(length)(runner.detached(task.later, requires=True), xs)
    torch.set_rng_state(generators)
    pairs = zip(task.body.form.leaves(bare), task.body.form.leaves(full), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
    return Sweep.PLAIN if same else Sweep.HOOKS
