"""Parameters and modules that a program makes itself, and values of it that come to require a gradient."""

import copy

import pytest
import torch
from side_by_side import compare, least, same
from torch import nn

from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, X = nn.Parameter(torch.randn(16, 16) / 4), torch.randn(8, 16).requires_grad_()


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def linear(x: torch.Tensor) -> torch.Tensor:
    layer = nn.Linear(16, 16)
    return layer(torch.tanh(layer(x) @ W))  # type: ignore[no-any-return]


def normalised(x: torch.Tensor) -> torch.Tensor:
    layer = nn.BatchNorm1d(16)
    return layer(torch.tanh(layer(x) @ W))  # type: ignore[no-any-return]


def copied(x: torch.Tensor) -> torch.Tensor:
    layer = copy.deepcopy(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    return layer(layer(x) @ W)  # type: ignore[no-any-return]


def drawn_into(x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(torch.empty(16, 16))
    nn.init.orthogonal_(weight)
    nn.init.trunc_normal_(weight, std=0.3)
    nn.init.xavier_uniform_(tensor=weight)
    return torch.tanh(x @ weight @ W)


def of_a_value(x: torch.Tensor) -> torch.Tensor:
    value = torch.randn(16, 16) / 4
    weight = nn.Parameter(value)
    with torch.no_grad():
        value.mul_(0.5)  # which the parameter shows
    return torch.tanh(x @ weight + value.sum() + weight.sum())


@pytest.mark.thinned(4)
@pytest.mark.parametrize("body", [linear, normalised, copied, drawn_into, of_a_value])
@pytest.mark.parametrize("planner", ["revolve", "auto"])
def test_parameters_made_inside(body: object, planner: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = body(x)  # type: ignore[operator]
        return x

    # With twice the least, how stretches are cut, which is measured, decides whether anything runs again at all.
    budget = 3 * max(least(program, [W, X], given, seed) for seed in range(4)) // 2
    found = compare(program, [W, X], given, budget, calls=4, planner=planner)
    assert found.report is not None
    assert found.report.reruns > 0
    assert "__new__" not in vars(torch.nn.Linear)


def test_a_parameter_that_the_program_gives_back_has_its_gradient() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, nn.Linear]:
        layer = nn.Linear(16, 16)
        for _ in range(8):
            x = torch.tanh(layer(x) @ W)
        return x, layer

    torch.manual_seed(1)
    y, plain = program(*given())
    y.sum().backward()
    torch.manual_seed(1)
    y, layer = Program(program, budget=28_000, planner="revolve")(*given())
    y.sum().backward()
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.is_leaf
    assert same(layer.weight, plain.weight)
    assert same(layer.weight.grad, plain.weight.grad)


def test_a_fixed_point_whose_backward_solves_a_linear_system_in_a_hook() -> None:
    inner, outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def cell(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inner(z) * 0.5 + outer(x))

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ W)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(15):
                z = cell(z, x)
        found = cell(z, x)
        start = found.clone().detach().requires_grad_()
        once = cell(start, x)

        def solved(gradient: torch.Tensor) -> torch.Tensor:
            result = gradient
            for _ in range(6):
                result = torch.autograd.grad(once, start, result, retain_graph=True)[0] + gradient
            return result

        if found.requires_grad:
            found.register_hook(solved)
        return torch.tanh(found @ W)

    leaves = [W, X, *inner.parameters(), *outer.parameters()]
    for planner, budget in (("revolve", None), ("auto", 6_400), ("auto", 9_000)):
        compare(program, leaves, given, budget, calls=4, planner=planner, reruns=budget != 9_000)
