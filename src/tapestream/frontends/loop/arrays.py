"""``adjoint=``: loops over NumPy arrays, for solvers written in other languages."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.capture.observe import Observation
from tapestream.capture.python_state import GENERATORS, things_behind
from tapestream.executor.loop.arrays import Adjoint, ArraySteps
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.traits import Body, StepTraits, Sweep
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.costs import StepCost
from tapestream.frontends.loop.inputs import Called, Inputs, Rows, source_of
from tapestream.frontends.loop.look import check_repeats, first_difference
from tapestream.planning.profile import undisturbed
from tapestream.planning.repeating import check_runs_alike
from tapestream.runner.ambient import HostGenerators, as_recompute
from tapestream.runner.belongings import Belongings
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
def looked(task: Task, stage: Stage, adjoint: Adjoint, steps: int | None, verify: bool) -> tuple[Task, StepCost]:
    """The task with what two steps on copies show, and what a step costs. ``task.state`` holds tensors.

    With ``verify``, raises GradientError where the first step gives two results for one state.
    """
    start = as_arrays(task.state)
    form = Form.of(start)
    most = 2 if steps is None else min(steps, 2)
    source = task.body.source
    given: Sequence[tuple[Any, ...]] = [()] * most if source is None else [(x,) for x in source.read(0, most)]
    own = tuple(things_behind(stage.function, GENERATORS))
    with undisturbed((stage,), torch.device("cpu"), own):
        host = HostGenerators.capture(own)
        state = _copied(start)
        mutates: set[int] = set()
        for number, x in enumerate(given):
            before, given_state, belongings = _copied(state), state, Belongings(stage.modules, stage.function)
            began = time.perf_counter()
            state = stage.function(state, *x)
            seconds = time.perf_counter() - began
            form.check(state, number)
            if number == 0:
                _check_first(stage, belongings, state, partial(_again, stage, start, x, host), form, verify)
            pairs = zip(form.leaves(before), form.leaves(given_state), strict=True)
            mutates |= {i for i, (a, b) in enumerate(pairs) if isinstance(b, numpy.ndarray) and not _same(a, b)}
        draws = not host.equals(HostGenerators.capture(own))
        began = time.perf_counter()
        adjoint(before, _copied(state), *given[-1])
        backward_seconds = time.perf_counter() - began
    floats = tuple(part.kind is not None and numpy.issubdtype(part.dtype, numpy.inexact) for part in form.parts)
    traits = StepTraits(Sweep.PLAIN, floats, floats, mutates=frozenset(mutates), draws_host=draws, generators=own)
    nbytes = sum(_OBJECT_NBYTES + leaf.nbytes for leaf in form.leaves(start) if hasattr(leaf, "nbytes"))
    cost = StepCost(seconds, backward_seconds, nbytes, nbytes, backward_extra_nbytes=2 * nbytes, between_nbytes=nbytes)
    body = Body(stage.function, form, traits, source, None, torch.device("cpu"))
    return replace(task, body=body), cost


def _again(stage: Stage, start: Any, given: tuple[Any, ...], host: HostGenerators) -> Any:
    """The first step once more, after which generators are as they are now."""
    after = HostGenerators.capture(one for one, _ in host.own)
    host.restore()
    state = stage.function(_copied(start), *given)
    after.restore()
    return state


def _check_first(
    stage: Stage, before: Belongings, state: Any, again: Callable[[], Any], form: Form, verify: bool
) -> None:
    check_runs_alike(stage, before, lambda: first_difference(state, again(), form) is None, [], Observation())
    if verify:
        check_repeats(state, again(), form)


def runner_with(adjoint: Adjoint) -> Any:
    """Makes the executor's part of a call."""

    def make(body: Body, steps: int | None, tick: Any) -> ArraySteps:
        return ArraySteps(body, steps, tick, adjoint=adjoint)

    return make


def _copied(state: Any) -> Any:
    return pytree.tree_map_only(numpy.ndarray, numpy.array, state)


def _same(a: Any, b: Any) -> bool:
    return bool(numpy.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
