"""`explain` names the user's own line, however far below the operation is called."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_sides import WIDTH
from torch import nn

import tapestream as ts

W = torch.eye(WIDTH)


def by_a_function(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ W)  # here


class Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ W)  # here


def by_a_partial(x: torch.Tensor) -> torch.Tensor:
    return functools.partial(torch.matmul, x)(W).tanh()  # here


def by_a_method(x: torch.Tensor) -> torch.Tensor:
    return x.matmul(W).tanh()  # here


def in_a_comprehension(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.tanh(x @ W) for _ in range(3)])  # here


def by_a_decorator(x: torch.Tensor) -> torch.Tensor:
    @functools.wraps(by_a_function)
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y @ W)  # here

    return inner(x)


def by_a_generator(x: torch.Tensor) -> torch.Tensor:
    def states() -> Any:
        y = x
        while True:
            y = torch.tanh(y @ W)  # here
            yield y

    return next(states())  # type: ignore[no-any-return]


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": by_a_function,
    "module": Own(),
    "module in modules": nn.Sequential(nn.Sequential(Own(), nn.Identity())),
    "partial": by_a_partial,
    "method": by_a_method,
    "comprehension": in_a_comprehension,
    "decorator": by_a_decorator,
    "generator": by_a_generator,
    "lambda": lambda x: torch.tanh(x @ W),  # here
}


@pytest.mark.parametrize("how", WAYS)
def test_the_line_is_the_users(how: str) -> None:
    x = torch.randn(64, WIDTH, requires_grad=True)
    rows = ts.Program(WAYS[how], budget="1 GiB").explain(x).rows
    with open(__file__) as file:
        lines = file.readlines()
    tanhs = [row for row in rows if row.operation == "tanh"]
    assert tanhs
    for row in tanhs:
        assert row.file == __file__
        assert "# here" in lines[row.line - 1]
