"""Which calls draw random numbers: not only those whose first one did."""

from collections.abc import Callable

import pytest
import torch
from side_by_side import compare, least
from torch import nn
from torch.nn import functional

from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, X = nn.Parameter(torch.randn(16, 16) / 4), torch.randn(8, 16).requires_grad_()


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def of_nothing(x: torch.Tensor, i: int) -> torch.Tensor:
    return torch.rand_like(x[: 0 if i == 0 else None]).sum() * x


def of_rate(x: torch.Tensor, i: int) -> torch.Tensor:
    return x + 0.1 * torch.poisson(torch.full_like(x, float(i), requires_grad=False))


def of_counts(x: torch.Tensor, i: int) -> torch.Tensor:
    return x + 0.1 * torch.binomial(torch.full_like(x, float(i), requires_grad=False), torch.full_like(x, 0.5).detach())


def of_signs(x: torch.Tensor, i: int) -> torch.Tensor:
    return functional.rrelu(x.abs() if i == 0 else x, training=True)


@pytest.mark.parametrize("draw", [of_nothing, of_rate, of_counts, of_signs])
def test_a_call_that_drew_nothing_at_first(draw: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for i in range(10):
            x = draw(torch.tanh(x @ W), i)
        return x

    compare(program, [W, X], given, least(program, [W, X], given, 0), calls=3)


def test_what_is_known_of_calls_that_draw_nothing_is_of_their_constants() -> None:
    """A later call of the program draws where an earlier one did not."""
    rate = [0.5]

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = functional.dropout(torch.tanh(x @ W), rate[0])
        return x

    run = Program(program, budget=least(program, [W, X], given, 0), planner="revolve")
    for rate[0] in (0.0, 0.5, 0.0, 0.5):
        W.grad = X.grad = None
        torch.manual_seed(1)
        program(*given()).sum().backward()
        wanted, state = (W.grad.clone(), X.grad.clone()), torch.get_rng_state()
        W.grad = X.grad = None
        torch.manual_seed(1)
        run(*given()).sum().backward()
        assert torch.equal(W.grad, wanted[0])
        assert torch.equal(X.grad, wanted[1])
        assert torch.equal(torch.get_rng_state(), state)
