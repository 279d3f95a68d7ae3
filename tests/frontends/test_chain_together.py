"""Tensors in several calls of chains, joins and loops before one backward: gradients have plain PyTorch's bits."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts

Stages = Sequence[Callable[[torch.Tensor], torch.Tensor]]
Run = Callable[[Stages, torch.Tensor], torch.Tensor]
WIDTH, ROWS = 64, 4


def twice(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: torch.sin(y * w) * torch.sigmoid(w) + 0.1


def once(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: torch.sin(y * w) + 0.1


def residual(w: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The state is used several times."""
    return lambda y: y * 0.5 + torch.sin(y * w) * 0.5 + y.tanh() * 0.1


def one_after_the_other(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run([once(w)] * 4, run([twice(w), once(w)], run([once(w)] * 3, x)))


def beside_each_other(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    a, b, c = run([once(w)] * 3, x), run([twice(w)] * 2, 2 * x), run([twice(w)], 3 * x)
    return b + a * b + c


def single_uses(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each call adds one part, and plain code adds parts between: nothing is handed on."""
    return run([once(w)], once(w)(run([once(w)], twice(w)(run([once(w)], x)))))


def plain_code_first(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run([once(w)] * 4, run([once(w)] * 3, twice(w)(x) + w))


def one_input(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    made = h * w
    return run([residual(w)] * 2, h) + run([residual(w)], h) * run([residual(w)] * 3, made) + run([residual(w)], made)


def some_are_dropped(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    first = run([once(w)] * 3, x)
    run([once(w)] * 3, first)  # nobody asks for its gradient
    return run([once(w)] * 4, first.detach()) + first


def many_inputs(run: Run, w: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Inputs that are gone when the next call is made, whose place in memory others take."""
    total = torch.zeros(())
    for k in range(6):
        total = total + run([residual(w)] * 2, (x + h) * (k + 1)).sum()
    return total


KINDS = [
    one_after_the_other, beside_each_other, single_uses, plain_code_first, one_input, some_are_dropped, many_inputs
]  # fmt: skip


def in_turn(stages: Stages, y: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        y = stage(y)
    return y


def chained(**options: Any) -> Run:
    return lambda stages, y: ts.Chain(stages, **options)(y)


def joined(stages: Stages, y: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = ts.Join([stages], nn.Identity(), budget="1MiB")(y)
    return out


def mixed() -> Run:
    """Chains and loops in turn, where a loop can do the same."""
    calls = [0]

    def run(stages: Stages, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] % 2 and all(stage is stages[0] for stage in stages):
            out: torch.Tensor = ts.Loop(stages[0], budget="1MiB")(y, steps=len(stages))
            return out
        return chained(budget="1MiB")(stages, y)

    return run


def gradients(how: Callable[..., torch.Tensor], run: Run, mode: str) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    w, h = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(ROWS, WIDTH))
    loss = how(run, w, h, torch.randn(ROWS, WIDTH)).square().sum()
    if mode == "grad":
        return list(torch.autograd.grad(loss, (w, h), allow_unused=True))
    loss.backward()
    return [w.grad, h.grad]


def check(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor | None]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["backward", "grad"])
@pytest.mark.parametrize("how", KINDS)
def test_one_sum(how: Callable[..., torch.Tensor], mode: str) -> None:
    wanted = gradients(how, in_turn, mode)
    for run in (chained(budget="1MiB"), chained(planner="bisection", budget="1MiB"), joined, mixed()):
        check(gradients(how, run, mode), wanted)


def branches(join: bool) -> list[torch.Tensor | None]:
    """One weight and one input in both branches, twice before one backward."""
    torch.manual_seed(0)
    w, h = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(ROWS, WIDTH))
    one, other = [residual(w), twice(w)], [once(w)] * 3
    run = ts.Join([one, other], budget="1MiB")
    total = torch.zeros(())
    for k in range(2):
        a, b = run(h, h) if join else (in_turn(one, h), in_turn(other, h))
        total = total + (a * b + k * a).square().sum()
    total.backward()
    return [w.grad, h.grad]


def test_joins_with_one_weight_and_one_input() -> None:
    check(branches(True), branches(False))


def test_a_backward_that_fails_leaves_nothing_for_the_next() -> None:
    w, x, fail = torch.randn(8, requires_grad=True), torch.randn(8), [True]
    run = ts.Chain([once(w), twice(w)], budget="1MiB")

    def refuse(gradient: torch.Tensor) -> None:
        if fail[0]:
            raise ValueError("no")

    first = run(x)
    first.register_hook(refuse)  # type: ignore[no-untyped-call]
    second = run(first)
    with pytest.raises(ValueError, match="no"):
        second.sum().backward()
    assert w.grad is None
    fail[0] = False
    (wanted,) = torch.autograd.grad(in_turn([once(w), twice(w)], x).sum(), w)
    assert torch.equal(torch.autograd.grad(first.sum(), w)[0], wanted)
