"""`CompiledSteps`: a stage is one or several chunks of steps that went through ``torch.compile`` as one function."""

from collections.abc import Callable, Iterator
from itertools import islice
from math import gcd
from typing import Any

from tapestream.errors import InputError
from tapestream.executor.loop.late import Late
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.sweep import paired
from tapestream.executor.loop.traits import Body

Chunk = Callable[[Any, list[Any]], tuple[Any, list[Any]]]
"""From a state and an input for each step (or none) to the state after them and the output of each (or none)."""


def unrolled(body: Body, length: int) -> Chunk:
    """``length`` steps one after the other, to be compiled."""
    function, given, paid = body.function, body.source is not None, body.sink is not None

    def chunk(state: Any, xs: list[Any]) -> tuple[Any, list[Any]]:
        outputs = []
        for number in range(length):
            state = function(state, xs[number]) if given else function(state)
            if paid:
                state, output = paired(state, number)
                outputs.append(output)
        return state, outputs

    return chunk


class CompiledSteps(TensorSteps):
    """As `TensorSteps`; ``chunks`` gives the compiled function of a length. Only whole stages are run.

    ``length``: steps of a compiled function (None: those of a stage), fewer where a stage is no multiple of it.
    """

    def __init__(
        self,
        body: Body,
        steps: int | None,
        tick: Callable[[int], None] | None = None,
        *,
        chunks: Callable[[int], Chunk],
        length: int | None = None,
    ) -> None:
        super().__init__(body, steps, tick)
        self.late = Late(set(), set())  # a graph for each step is not what a chunk makes
        self._chunks = chunks
        self._length = body.chunk if length is None else gcd(body.chunk, length)

    def _run_bare(
        self, state: Any, start: int, stop: int, function: Callable[..., Any], ended: Callable[[Any], bool] | None
    ) -> Any:
        if ended is not None:
            raise InputError("Loop: a compiled loop cannot stop inside a chunk; use steps=, or compile=False")
        fresh = function is not self.body.function  # the sweep runs with gradients on
        size, sink = self._length, self.body.sink
        chunk = self._chunks(size)
        for first in range(start, stop, size):
            last = min(first + size, stop)
            if last - first < size:
                chunk = self._chunks(last - first)
            state, outputs = chunk(self.detached(state, requires=True) if fresh else state, self._xs(first, last))
            self.form.check(state, last - 1)
            if sink is not None and self.first_run:
                for step, output in enumerate(outputs, first):
                    if sink.wants(step):
                        self._take(step, output)
        return state

    def _run(self, state: Any, xs: Iterator[tuple[Any, ...]], first: int, last: int) -> Iterator[tuple[Any, Any]]:
        for begin in range(first, last, self._length):
            count = min(self._length, last - begin)
            given = [x for (x,) in islice(xs, count)] if self.body.source is not None else []
            state, outputs = self._chunks(count)(state, given)
            for number in range(count):
                yield state, outputs[number] if outputs else None

    def _xs(self, first: int, last: int) -> list[Any]:
        return [] if self.body.source is None else list(self.body.source.read(first, last))
