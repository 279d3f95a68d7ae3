"""Loops to which gradients come on other ways than by their first state: by rows of inputs, or a start that is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_sides import WIDTH
from exact import Trace, assert_same, copy_of
from torch import nn

import tapestream as ts

STEPS = 7


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any, x: torch.Tensor | None = None) -> Any:
        inside = self.linear(state) if x is None else self.linear(state) + self.gate(x)
        return torch.tanh(inside)


class Net(nn.Module):
    """``loop(step, state, inputs)`` gives the last state, and with outputs all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.before, self.after = Cell(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.rows = nn.Parameter(torch.randn(STEPS, 4, WIDTH))
        self.start, self.kind = nn.Parameter(torch.randn(4, WIDTH)), kind

    def forward(self, loop: Callable[..., Any], x: torch.Tensor) -> Any:
        zeros = torch.zeros(4, WIDTH)
        match self.kind:
            case "an encoder alone":
                return self.after(loop(self.cell, zeros, self.before(x))).sum()
            case "rows that are parameters":
                return self.after(loop(self.cell, zeros, self.rows)).sum()
            case "a start that is a parameter":
                return self.after(loop(self.cell, self.start, x)).sum()
            case "the encoder's last row starts":
                encoded = self.before(x)
                return self.after(loop(self.cell, encoded[-1], encoded)).sum()
            case "rows from one tensor":
                return self.after(loop(self.cell, zeros, self.before(x[0]).expand(STEPS, 4, WIDTH))).sum()
            case "two loops in a row":
                first = loop(self.cell, zeros, self.before(x))
                return self.after(loop(self.cell, first, self.rows)).sum()
            case "rows of two":
                double = torch.complex(self.before(x), self.rows).abs()
                return self.after(loop(self.cell, zeros, double)).sum()
            case _:
                return self.after(loop(self.cell, zeros, self.before(x).detach() + self.rows)).sum()


KINDS = (
    "an encoder alone", "rows that are parameters", "a start that is a parameter", "the encoder's last row starts",
    "rows from one tensor", "two loops in a row", "rows of two", "a detached encoder",
)  # fmt: skip


def plainly(step: Any, state: Any, inputs: torch.Tensor) -> Any:
    for row in inputs:
        state = step(state, row)
    return state


def by_loop(budget: int | None) -> Callable[..., Any]:
    def run(step: Any, state: Any, inputs: torch.Tensor) -> Any:
        return ts.Loop(step, budget=budget)(state, inputs=inputs, steps=STEPS)

    return run


def gradients(kind: str, loop: Callable[..., Any]) -> Trace:
    torch.manual_seed(0)
    net, trace = Net(kind), Trace()
    for number in range(2):
        loss = net(loop, torch.randn(STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        trace |= {f"{number} {name}": copy_of(p.grad) for name, p in net.named_parameters()}
        trace[f"{number} loss"] = copy_of(loss)
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    expected = gradients(kind, plainly)
    assert_same(expected, gradients(kind, by_loop(None)))
    budget = 1
    for _ in range(8):
        try:
            assert_same(expected, gradients(kind, by_loop(budget)))
        except ts.BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
        else:
            return
    raise AssertionError("each budget named was refused in turn")
