"""`ArraySteps`: steps on NumPy arrays, differentiated by an adjoint that the user has written."""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from tapestream.errors import InputError
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.steps import TensorSteps
from tapestream.executor.loop.traits import Body

Adjoint = Callable[..., Any]
"""``adjoint(state, cotangent)``, or with the step's input as third argument: the cotangent of ``state``."""


class ArraySteps(TensorSteps):
    """As `TensorSteps`, without autograd: a tape is the states before the steps of its stage."""

    def __init__(
        self, body: Body, steps: int | None, tick: Callable[[int], None] | None = None, *, adjoint: Adjoint
    ) -> None:
        super().__init__(body, steps, tick)
        self._adjoint = adjoint

    def sweep(self, state: Any, start: int, stop: int, ended: Callable[[Any], bool] | None = None) -> Any:
        """See `TensorSteps`."""
        return self.plain(state, start, stop, ended)

    def detached(self, state: Any, *, requires: bool = False) -> Any:
        """The state as arrays over the tensors' bytes."""
        leaves = [leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf for leaf in self.form.leaves(state)]
        return self.form.build(leaves)

    def record(self, live: list[Any], stage: int, *, output_needed: bool) -> tuple[Any, Any]:
        """Keep the state before each step of the stage."""
        state = live.pop()
        first, last = stage * self.body.chunk, self._end(stage + 1)
        source = self.body.source
        given = [()] * (last - first) if source is None else [(x,) for x in source.read(first, last)]
        tape = []
        for step, x in enumerate(given, first):
            tape.append((self.keeper.own(state), x))
            state = self.body.function(state, *x)
            self.form.check(state, step)
        if self.tick is not None:
            self.tick(last - first)
        return state, tape

    def backward(self, tape: Any, stage: int, cotangent: Any) -> Any:
        """The adjoint of each step, the last one first. Cotangents go by leaf, as tensors."""
        leaves = [self._zeros(i) if g is None else g.numpy() for i, g in enumerate(cotangent)]
        arrays = self.form.build(leaves)
        for state, x in reversed(tape):
            arrays = self._adjoint(state, arrays, *x)
            self._check(arrays, stage)
        return [self._tensor(i, leaf) for i, leaf in enumerate(self.form.leaves(arrays))]

    def _check(self, arrays: Any, stage: int) -> None:
        if self.form.matches(arrays):
            return
        found = Form.of(arrays, "cotangent")  # other dtypes are allowed
        pairs = zip(found.parts, self.form.parts, strict=False)
        if found.spec != self.form.spec or any(part.kind and part.shape != was.shape for part, was in pairs):
            raise InputError(
                f"Loop: adjoint= returned {self.form.differences(arrays)} at step {stage * self.body.chunk}; it must "
                "return the cotangent of its state, in the same structure and shapes"
            )

    def _zeros(self, leaf: int) -> Any:
        part = self.form.parts[leaf]
        return None if part.kind is None else numpy.zeros(part.shape, part.dtype)

    def _tensor(self, leaf: int, array: Any) -> torch.Tensor | None:
        part = self.form.parts[leaf]
        if part.kind is None or array is None:
            return None
        return torch.from_numpy(numpy.ascontiguousarray(array, part.dtype).reshape(part.shape))
