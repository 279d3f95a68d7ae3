"""Ends of stretches that are kept from the first sweep, where that saves much that is long to make."""

from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from tapestream.frontends.program.program import Program
from tapestream.frontends.program.sizes import Sizes
from tapestream.ir import Action, Phase, PhaseKind, Record
from tapestream.storage.meter import track_memory
from tests.frontends.program.side_by_side import compare
from tests.frontends.program.test_program_record import Products

WIDTH, ROWS, BLOCKS = 32, 64, 16
_SECONDS = {"linear": 10.0, "gelu": 2.0, "dropout": 2.0}
generator = torch.Generator().manual_seed(0)
UP = [torch.randn(4 * WIDTH, WIDTH, generator=generator).div(8).requires_grad_() for _ in range(BLOCKS)]
DOWN = [torch.randn(WIDTH, 4 * WIDTH, generator=generator).div(16).requires_grad_() for _ in range(BLOCKS)]


def network(x: torch.Tensor) -> torch.Tensor:
    for up, down in zip(UP, DOWN, strict=True):
        x = functional.dropout(x + functional.linear(functional.gelu(functional.linear(x, up)), down), 0.1)
    return x


@pytest.fixture(autouse=True)
def seconds_that_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(sizes: Sizes) -> Any:
        record = sizes.record
        names = [getattr(record.pattern(k).function, "__name__", "") for k in range(len(record))]
        return numpy.array([_SECONDS.get(name, 0.1) for name in names])

    monkeypatch.setattr(Sizes, "seconds", seconds)


def sweep_of(run: Program) -> list[Action]:
    assert run.plan is not None
    actions = list(run.plan.schedule)
    return actions[: actions.index(Phase(PhaseKind.BACKWARD))]


def test_what_a_dropout_saves_is_kept_and_the_product_before_it_is_not_made_again() -> None:
    x = torch.ones(ROWS, WIDTH)
    with track_memory() as meter:
        y = network(x)
    tape = meter.end_nbytes
    del y
    run = compare(network, [*UP, *DOWN], lambda: (x,), 2 * tape // 5, calls=4, planner="auto")
    tails = [a for a, b in pairwise(sweep_of(run)) if isinstance(a, Record) and not isinstance(b, Record)]
    assert len(tails) >= BLOCKS // 3
    assert run.report is not None
    assert run.report.planned
    for weight in (*UP, *DOWN):
        weight.grad = torch.zeros_like(weight)
    with track_memory() as meter, Products() as products:
        run(x).sum().backward()
    again = products.count - 2 * BLOCKS - (4 * BLOCKS - 1)  # two reverse one; the first gives no gradient of x
    assert 0 < again <= 1.3 * BLOCKS
    assert meter.peak_nbytes <= 1.05 * (2 * tape // 5) + 2 * UP[0].nbytes + 2 * x.nbytes
    for weight in (*UP, *DOWN):
        weight.grad = None
