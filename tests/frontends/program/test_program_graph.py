"""What plain autograd's own graph gives a program: hooks, second backwards, gradients of gradients, escaped tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tapestream.frontends.program.program import Program

W = (torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) / 2).requires_grad_()
NET = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
BUDGETS = (32_000, 48_000, 1 << 20)


def chain(y: torch.Tensor, steps: int = 60) -> torch.Tensor:
    for _ in range(steps):
        y = torch.tanh(y @ W) + torch.nn.functional.dropout(y, 0.2)
    return y


def beside(function: Callable[[Callable[[], Any]], list[torch.Tensor]], program: Callable[[], Any]) -> None:
    """``function`` gives the same bits for the program and for plain PyTorch, in a first and a planned call."""
    torch.manual_seed(1)
    expected = function(program)
    for budget in BUDGETS:
        run = Program(program, budget=budget)
        for _ in range(2):
            torch.manual_seed(1)
            found = function(run)
            assert all(map(torch.equal, found, expected))
            assert len(found) == len(expected)


def test_a_hook_inside_and_a_module_with_a_backward_hook() -> None:
    seen: list[torch.Tensor] = []

    def program() -> torch.Tensor:
        y = chain(W)
        y.register_hook(lambda g: g * 2)
        middle = NET(y)
        middle.register_hook(lambda g: seen.append(g.clone()))
        return chain(middle).sum()

    def gradients(run: Callable[[], Any]) -> list[torch.Tensor]:
        seen.clear()
        handle = NET[0].register_full_backward_hook(lambda module, given, out: seen.append(out[0].clone()))
        found = list(torch.autograd.grad(run(), [W, *NET.parameters()]))
        handle.remove()
        return found + seen

    beside(gradients, program)


def test_a_second_backward() -> None:
    def twice(run: Callable[[], Any]) -> list[torch.Tensor]:
        y = run()
        first = torch.autograd.grad(y.sum(), W, retain_graph=True)
        return [*first, *torch.autograd.grad((y * y).sum(), W)]

    beside(twice, lambda: chain(W))


def test_a_gradient_of_a_gradient() -> None:
    def penalty(run: Callable[[], Any]) -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(run().sum(), W, create_graph=True)
        return list(torch.autograd.grad((first * first).sum(), W))

    beside(penalty, lambda: chain(W))


def test_tensors_that_escape_and_results_of_which_one_is_used() -> None:
    escaped: list[torch.Tensor] = []

    def program() -> Any:
        y = chain(W)
        escaped[:] = [y * y]
        return chain(y), chain(y, 3)

    def parts(run: Callable[[], Any]) -> list[torch.Tensor]:
        _, second = run()
        inner = torch.autograd.grad(escaped[0].sum(), W, retain_graph=True)
        return [*inner, *torch.autograd.grad(second.sum(), W)]

    beside(parts, program)


def test_a_leaf_made_inside_and_the_graph_looked_at() -> None:
    leaves: list[torch.Tensor] = []

    def program() -> torch.Tensor:
        leaf = torch.ones(6, requires_grad=True)
        leaves[:] = [leaf]
        y = chain(W * leaf)
        assert y.grad_fn is not None
        return y.sum()

    def both(run: Callable[[], Any]) -> list[torch.Tensor]:
        W.grad = None
        run().backward()
        assert W.grad is not None
        assert leaves[0].grad is not None
        return [W.grad, leaves[0].grad]

    beside(both, program)
    W.grad = None


def test_two_results_over_the_same_memory_one_of_which_is_changed() -> None:
    def program() -> Any:
        y = chain(W) * 2
        return y, y[0]

    def changed(run: Callable[[], Any]) -> list[torch.Tensor]:
        y, row = run()
        row.mul_(3)
        return list(torch.autograd.grad(y.sum(), W))

    beside(changed, program)


@pytest.mark.parametrize("budget", [1 << 20])
def test_what_fits_is_not_run_twice(budget: int) -> None:
    run = Program(lambda: chain(W).sum(), budget=budget)
    for _ in range(2):
        run().backward()
        assert run.report is not None
        assert run.report.reruns == 0
        assert run.report.recorded == run.report.stages
    W.grad = None
