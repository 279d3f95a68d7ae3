"""The least budget that a step says it needs, and what it then takes."""

import gc
from collections.abc import Callable
from typing import Any

import pytest

import tapestream as ts
from tapestream.cli.loop import held_nbytes
from tapestream.storage.meter import track_memory

SMALL = 8 * 1024  # counters, scalars and the like


def least_and_measured(
    start: Callable[[int], tuple[Any, Any]], backward: Callable[[Any], None], too_little: int
) -> tuple[int, int]:
    """The least budget, and the peak of a step within it. ``start``: model and optimizer for a budget; ``backward``:
    forward and backward of a model; ``too_little``: a budget that is refused."""

    def step() -> None:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = start(too_little)
    with pytest.raises(ts.BudgetError) as refused:
        step()
    least = refused.value.least_nbytes
    assert least is not None
    ts.unstream(model)
    model, optimizer = start(least)
    for _ in range(2):
        step()
    for _ in range(2):  # what a step frees is seen only if the step that made it was measured too
        gc.collect()
        held = held_nbytes(model)
        with track_memory() as meter:
            step()
    ts.unstream(model)
    return least, held + meter.peak_nbytes
