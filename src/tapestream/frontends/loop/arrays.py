"""``adjoint=``: loops over NumPy arrays, for solvers written in other languages."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.costs import StageCost
from tapestream.executor.loop.arrays import Adjoint, ArraySteps
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.traits import Body, StepTraits, Sweep
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.inputs import Called, Inputs, Rows, source_of
from tapestream.frontends.loop.look import check_repeats
from tapestream.frontends.loop.reach import generators_behind
from tapestream.planning.profile import undisturbed
from tapestream.runner.ambient import HostGenerators, as_recompute
from tapestream.runner.stage import Stage

_OBJECT_NBYTES = 300
"""What an array takes beside its numbers."""


def source_of_arrays(inputs: Any) -> Inputs | None:
    """As `source_of`; rows stay arrays."""
    source = source_of(inputs, torch.device("cpu"))
    if not isinstance(source, Rows):
        return source
    rows = as_arrays(inputs)
    called = Called(lambda step: pytree.tree_map_only(numpy.ndarray, lambda leaf: leaf[step], rows))
    called.length = source.length
    return called


def has_tensors(state: Any) -> bool:
    """Whether any leaf is a tensor: the result's leaves are then tensors too."""
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(state))


def as_tensors(state: Any) -> Any:
    """The state with tensors over the bytes of its arrays."""
    return pytree.tree_map_only(numpy.ndarray, torch.from_numpy, state)


def as_arrays(state: Any) -> Any:
    """The state with arrays over the bytes of its tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().numpy(), state)


@as_recompute()
def looked(task: Task, stage: Stage, adjoint: Adjoint, steps: int | None, verify: bool) -> tuple[Task, StageCost]:
    """The task with what two steps on copies show, and what a step costs. ``task.state`` holds tensors.

    With ``verify``, raises GradientError where the first step gives two results for one state.
    """
    start = as_arrays(task.state)
    form = Form.of(start)
    most = 2 if steps is None else min(steps, 2)
    source = task.body.source
    given: Sequence[tuple[Any, ...]] = [()] * most if source is None else [(x,) for x in source.read(0, most)]
    own = tuple(generators_behind(stage.function))
    with undisturbed((stage,), torch.device("cpu"), own):
        host = HostGenerators.capture(own)
        state = _copied(start)
        mutates: set[int] = set()
        for number, x in enumerate(given):
            before, given_state = _copied(state), state
            began = time.perf_counter()
            state = stage.function(state, *x)
            seconds = time.perf_counter() - began
            form.check(state, number)
            if verify and number == 0:
                after = HostGenerators.capture(own)
                host.restore()
                check_repeats(state, stage.function(_copied(start), *x), form)
                after.restore()
            pairs = zip(form.leaves(before), form.leaves(given_state), strict=True)
            mutates |= {i for i, (a, b) in enumerate(pairs) if isinstance(b, numpy.ndarray) and not _same(a, b)}
        draws = not host.equals(HostGenerators.capture(own))
        began = time.perf_counter()
        adjoint(before, _copied(state), *given[-1])
        backward_seconds = time.perf_counter() - began
    floats = tuple(part.kind is not None and numpy.issubdtype(part.dtype, numpy.inexact) for part in form.parts)
    traits = StepTraits(Sweep.PLAIN, floats, floats, mutates=frozenset(mutates), draws_host=draws, generators=own)
    nbytes = sum(_OBJECT_NBYTES + leaf.nbytes for leaf in form.leaves(start) if hasattr(leaf, "nbytes"))
    cost = StageCost(seconds, backward_seconds, nbytes, nbytes, backward_extra_nbytes=2 * nbytes)
    body = Body(stage.function, form, traits, source, None, torch.device("cpu"))
    return replace(task, body=body), cost


def runner_with(adjoint: Adjoint) -> Any:
    """Makes the executor's part of a call."""

    def make(body: Body, steps: int | None, tick: Any) -> ArraySteps:
        return ArraySteps(body, steps, tick, adjoint=adjoint)

    return make


def _copied(state: Any) -> Any:
    return pytree.tree_map_only(numpy.ndarray, numpy.array, state)


def _same(a: Any, b: Any) -> bool:
    return bool(numpy.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
