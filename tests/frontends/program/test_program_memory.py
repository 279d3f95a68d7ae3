"""Bytes held, operations run again, and the size of the record."""

import gc
import sys

import pytest
import torch

from tapestream.frontends.program.program import Program
from tapestream.storage.meter import track_memory

SIDE = 64
W = (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) / 8).requires_grad_()


def program(x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = torch.tanh(x @ W)
    return x


def peak(run: Program, steps: int) -> int:
    x = torch.ones(SIDE, SIDE)
    W.grad = torch.zeros_like(W)
    with track_memory() as meter:
        run(x, steps).sum().backward()
    W.grad = None
    return meter.peak_nbytes


@pytest.mark.xfail(reason="up to 2 states above it in some plans; not exported before this holds", strict=False)
@pytest.mark.parametrize("steps", [50, 400])
def test_the_peak_stays_within_the_budget(steps: int) -> None:
    state = SIDE * SIDE * 4
    budget = 32 * state
    run = Program(program, budget=budget, planner="revolve")
    peak(run, steps)
    found = peak(run, steps)
    outside = 2 * state + 16_384  # the result, the gradient of W, states of generators
    assert found <= 1.05 * budget + outside
    plain = 2 * steps * state
    assert found < plain


def test_ten_times_longer_needs_no_more() -> None:
    budget = 32 * SIDE * SIDE * 4
    run = Program(program, budget=budget, planner="revolve")
    peaks = []
    for steps in (60, 600):
        peak(run, steps)
        peaks.append(peak(run, steps))
    assert peaks[1] <= peaks[0] + 2 * SIDE * SIDE * 4


def test_backward_runs_as_many_stretches_as_planned() -> None:
    run = Program(program, budget=24 * SIDE * SIDE * 4, planner="revolve")
    for planned in (False, True):
        y = run(torch.ones(SIDE, SIDE), 40)
        call = y.grad_fn.call
        stages: list[int] = []
        inner = call.steps._run
        call.steps._run = lambda state, stage, inner=inner, stages=stages: stages.append(stage) or inner(state, stage)
        y.sum().backward()
        assert run.report is not None
        assert run.report.planned is planned
        assert len(stages) == run.report.reruns
        assert set(stages) == set(range(run.report.stages))
        cuts = call.steps.cuts
        assert call.steps.operations == sum(cuts[k + 1] - cuts[k] for k in stages)
    W.grad = None


def test_the_record_takes_few_bytes_an_operation() -> None:
    y = Program(program, budget="64MiB", planner="revolve")(torch.ones(2, SIDE), 2000)
    record = y.grad_fn.call.record
    gc.collect()
    patterns = sum(sys.getsizeof(p) for p in record.patterns.all)
    assert len(record) == 4000
    assert (record.host_nbytes() + patterns) / len(record) < 400
