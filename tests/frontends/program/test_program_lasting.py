"""What many states hold alike takes its bytes once: plans that know it run less again, within the same budget."""

import gc
from collections.abc import Callable

import pytest
import torch
from side_by_side import compare, fix_seconds
from test_program_budgets import least
from torch.nn.functional import dropout

from tapestream.frontends.program.candidates import Found
from tapestream.frontends.program.cuts import Borders
from tapestream.frontends.program.program import Program
from tapestream.planning.auto import make_plan
from tapestream.planning.exceeded import limit_of
from tapestream.storage.meter import track_memory

ROWS, WIDTH, STEPS = 256, 32, 24
Function = Callable[[torch.Tensor], torch.Tensor]
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
W, V = ((torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(k)) / 8).requires_grad_() for k in (1, 2))


def injected(x: torch.Tensor) -> torch.Tensor:
    """Every step adds ``u``, which does not change."""
    u, z = x @ V, torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(STEPS // 2):
            z = torch.tanh(z @ W + u)
    for _ in range(STEPS):
        z = 0.2 * z + 0.8 * torch.tanh(z @ W + u)
    return z.square().mean()


def saved(x: torch.Tensor) -> torch.Tensor:
    """Every step saves ``u``, too, and what is drawn; a view of it is used as well."""
    u, z = torch.tanh(x @ V), x
    for _ in range(STEPS // 2):
        z = dropout(torch.tanh(z @ W) * u + u[:, :1], 0.2)
    return z.square().mean()


def weight(x: torch.Tensor) -> torch.Tensor:
    """The weight is made inside, and the last thing that is used."""
    w, z = torch.softmax(V @ W, 0), x[:WIDTH]
    for _ in range(STEPS // 2):
        z = torch.tanh(z @ w)
    return (z * w).sum()


def written(x: torch.Tensor) -> torch.Tensor:
    """What lasts is written into at the end: restart checkpoints hold copies."""
    u, z = x @ V, x
    for _ in range(STEPS // 2):
        z = torch.tanh(z @ W + u)
    u.mul_(0.5)
    return (z + u).square().mean()


def borders_of(function: Function, monkeypatch: pytest.MonkeyPatch) -> Borders:
    program, found = Program(function, budget="1GiB"), list[Borders]()
    made = program._borders
    monkeypatch.setattr(program, "_borders", lambda sweep: found.append(made(sweep)) or found[-1])  # type: ignore[func-returns-value]
    program(X).backward()
    return found[-1]


def test_what_lasts_counts_once_in_one_of_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    each, once = borders_of(injected, monkeypatch).ways
    cuts = each.cuts(16, timed=False)
    nbytes = ROWS * WIDTH * 4
    before, after = each.profile(cuts), once.profile(cuts)
    assert after.outside_nbytes == before.outside_nbytes + nbytes
    assert [a.output_nbytes - b.output_nbytes for a, b in zip(before.stages, after.stages, strict=True)][1:-2] == (
        [nbytes] * (len(cuts) - 4)
    )


def test_what_is_written_into_counts_in_each_state(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = borders_of(written, monkeypatch).ways
    assert only.profile(only.cuts(16)).outside_nbytes < ROWS * WIDTH * 4


def test_no_saved_tensors_stay_of_a_stretch_that_makes_what_lasts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    each, once = borders_of(injected, monkeypatch).ways
    assert each.tail_allowed(0, 12)
    assert not once.tail_allowed(0, 12)
    assert once.tail_allowed(12, 18)


def test_less_runs_again_within_the_same_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_seconds(monkeypatch, {})
    each, once = borders_of(injected, monkeypatch).ways
    cuts, budget = each.cuts(32, timed=False), 18 * ROWS * WIDTH * 4

    def again(way: Borders) -> float:
        return Found(make_plan(way.profile(cuts), budget, planner="rotor"), cuts).again(way)

    assert again(once) <= 0.75 * again(each)


@pytest.mark.on_cpu("other bytes on a GPU")
@pytest.mark.parametrize("function", [saved, weight, written])
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_bits_and_peak(function: Function, factor: float) -> None:
    budget = int(factor * least(function, X))
    program = compare(function, [W, V], lambda: (X,), budget, planner="auto", reruns=factor == 1)
    for leaf in (W, V):
        leaf.grad = torch.zeros_like(leaf)  # so that it takes no new memory
    gc.collect()
    with track_memory() as meter:
        program(X).backward()
    assert meter.peak_nbytes <= limit_of(budget)
