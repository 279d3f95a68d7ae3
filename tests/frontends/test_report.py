"""`ts.report` of chains, joins, loops and programs."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.system import heap

WEIGHT = nn.Parameter(torch.eye(64))
X = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)
MACHINE = ts.Machine({pair: ts.Link(1e9, 0) for pair in itertools.permutations(ts.Tier, 2)})


def step(h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ WEIGHT)


def several(h: torch.Tensor) -> torch.Tensor:
    for _ in range(9):
        h = step(h)
    return h


FRONTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "Chain": (lambda **o: ts.Chain([step] * 9, **o), lambda run: run(X)),
    "Join": (lambda **o: ts.Join([[step] * 9], **o), lambda run: run(X)[0]),
    "Loop": (lambda **o: ts.Loop(step, **o), lambda run: run(X, steps=9)),
    "Program": (lambda **o: ts.Program(several, **o), lambda run: run(X)),
}


@pytest.mark.parametrize("name", FRONTS)
def test_what_was_planned_is_shown(name: str) -> None:
    make, call = FRONTS[name]
    run = make(budget="300KiB")
    with pytest.raises(InputError, match=f"this {name} has not been called with gradients yet"):
        ts.report(run)
    for _ in range(2):
        call(run).sum().backward()  # type: ignore[no-untyped-call]
    found = ts.report(run)
    assert found.plan is run.plan
    assert found.exceeded is None
    assert "moved        nothing" in str(found)
    assert "exceeded" not in str(found)
    WEIGHT.grad = None


def test_bytes_moved_count_since_the_last_report(tmp_path: Path) -> None:
    run = ts.Chain([step] * 9, budget="300KiB", folder=tmp_path, home="disk", machine=MACHINE, planner="offload")
    counted = []
    for _ in range(3):
        run(X).sum().backward()
        counted.append(sum(ts.report(run).bytes_moved.values()))
    assert counted[1] == counted[2] > 0
    assert sum(ts.report(run).bytes_moved.values()) == 0
    WEIGHT.grad = None


def test_what_exceeds_its_budget_is_shown() -> None:
    run = ts.Loop(step, budget="300KiB")
    run(X, steps=9).sum().backward()
    with pytest.warns(ts.BudgetExceeded, match="Loop: a call holds 2.00 KiB .*1.00 KiB was asked for: somebody does"):
        run.exceeded.say(2048, 1024, "somebody does")
    assert "exceeded     Loop: a call holds 2.00 KiB" in str(ts.report(run))
    WEIGHT.grad = None


def test_live_and_resident_bytes_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ts.Chain([step] * 9, budget="300KiB")
    run(X).sum().backward()
    WEIGHT.grad = None
    before = ts.report(run)
    held = torch.ones(1 << 24)
    after = ts.report(run)
    assert after.resident_nbytes - before.resident_nbytes > 48 << 20
    assert "of RAM for the whole process, now" in str(after)
    if heap.live_nbytes() is not None:  # glibc says
        assert before.live_nbytes is not None
        assert after.live_nbytes is not None
        assert 0 <= after.live_nbytes - before.live_nbytes - held.nbytes < 1 << 20
        assert "live in the C library's heap" in str(after)
    monkeypatch.setattr(heap, "function", lambda name: None)
    assert ts.report(run).live_nbytes is None
    assert "live in" not in str(ts.report(run))
