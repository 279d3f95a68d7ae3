"""Functions that keep on their context what their backward needs, where no hook sees it."""

import gc
from typing import Any

import pytest
import torch
from side_by_side import outcome
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError

SIDE = 64
NBYTES = SIDE * SIDE * 4


class Keeps(torch.autograd.Function):
    """Six times what it is given, as a list on its context. It draws, and gives a second result without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, count: int) -> Any:
        ctx.waves = [torch.sin(x * (k + 1)) + torch.rand(()) for k in range(count)]
        ctx.save_for_backward(weight)
        most = ctx.waves[0].max(dim=1).indices
        ctx.mark_non_differentiable(most)
        return sum(ctx.waves) * weight, most

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (weight,) = ctx.saved_tensors
        g = cotangents[0]
        return g * weight * sum(ctx.waves), (g * ctx.waves[1]).sum(0), None


class Writes(Keeps):
    """The same, but it writes into what it is given: it cannot run again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, count: int) -> Any:
        ctx.mark_dirty(x)
        ctx.waves = [torch.sin(x * (k + 1)) for k in range(count)]
        ctx.save_for_backward(weight)
        return x.add_(1.0), x.argmax()


def solver(function: Any, steps: int = 12) -> Any:
    torch.manual_seed(0)
    layer, scale = nn.Linear(SIDE, SIDE), nn.Parameter(torch.ones(SIDE))

    def solve(x: torch.Tensor) -> torch.Tensor:
        for _ in range(steps):
            y, most = function.apply(torch.tanh(layer(x)) * 0.1, scale, 6)
            x = y * 0.05 + most.sum() * 1e-6
        return x.square().sum()

    return solve, [*layer.parameters(), scale]


def test_they_run_again_and_are_exact() -> None:
    solve, leaves = solver(Keeps)
    budget = 20 * NBYTES
    run = ts.Program(solve, budget=budget)
    for seed in range(3):
        wanted = outcome(solve, leaves, lambda: (torch.ones(SIDE, SIDE),), seed)
        found = outcome(run, leaves, lambda: (torch.ones(SIDE, SIDE),), seed)
        for a, b in zip((*wanted[0], *wanted[2], wanted[3]), (*found[0], *found[2], found[3]), strict=True):
            assert torch.equal(a, b)
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    with ts.track_memory() as meter:
        run(torch.ones(SIDE, SIDE)).backward()
    gradients = sum(leaf.grad.nbytes for leaf in leaves)
    assert meter.peak_nbytes <= 1.02 * budget + gradients + 16_384 + NBYTES  # and the argument


def test_where_there_is_room_they_keep_what_they_like() -> None:
    solve, _ = solver(Keeps)
    run = ts.Program(solve, budget="1GiB")
    run(torch.ones(SIDE, SIDE)).backward()
    assert not run._again


def test_those_that_cannot_run_again_are_told_once() -> None:
    solve, _ = solver(Writes)
    run = ts.Program(solve, budget=20 * NBYTES)
    with pytest.warns(ts.BudgetExceeded, match="Writes keeps .* on its context; use ctx.save_for_backward in it"):
        run(torch.ones(SIDE, SIDE)).backward()
    run(torch.ones(SIDE, SIDE)).backward()


def test_what_it_reads_beside_its_arguments_must_not_change() -> None:
    table = torch.ones(SIDE)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = [x * table * k for k in range(8)]
            return ctx.kept[1] + 0

        @staticmethod
        def backward(ctx: Any, *g: Any) -> Any:
            return g[0] * ctx.kept[1]

    weight = nn.Parameter(torch.ones(SIDE, SIDE))
    run = ts.Program(lambda: Reads.apply(Reads.apply(weight * 2)).sum(), budget=40 * NBYTES)
    run().backward()
    run().backward()
    loss = run()
    table.add_(1)
    with pytest.raises(GradientError, match="that is not among its arguments and was written into"):
        loss.backward()


def test_gradients_of_gradients_are_refused_by_name() -> None:
    solve, leaves = solver(Keeps)
    run = ts.Program(solve, budget=20 * NBYTES)
    run(torch.ones(SIDE, SIDE)).backward()
    with pytest.raises(GradientError, match="which keeps tensors on its context, was differentiated with create_graph"):
        torch.autograd.grad(run(torch.ones(SIDE, SIDE)), leaves, create_graph=True)


def test_two_backwards_of_one_call() -> None:
    solve, leaves = solver(Keeps)
    run = ts.Program(solve, budget=20 * NBYTES)
    run(torch.ones(SIDE, SIDE)).backward()
    loss = run(torch.ones(SIDE, SIDE))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
