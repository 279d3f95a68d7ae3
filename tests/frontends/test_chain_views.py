"""Stages that write into views which stages before them have made: exact under every planner."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import LEVELS, PLANNERS, assert_exact, called_once
from models import Case, Stages, rows
from thinned import one_in
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.chain import Chain

WIDTH = 4


class OnFirst(nn.Module):
    """A layer on the first tensor of the state (x, older tensors)."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: Any) -> Any:
        x, *rest = state
        return (self.layer(x), *rest)


class Scale(nn.Module):
    """Writes into its input; the gradient of its weight is a sum whose order follows the strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.weight)


class Bias(nn.Module):
    """Writes into its input; the gradient of its weight is a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.weight)


def turned(state: Any) -> Any:
    """A view (of a copy, at first), and an expanded sum of what it shows: two more uses of what is behind the view."""
    x, *rest = state
    return (x.transpose(0, 1).contiguous().transpose(0, 1), *rest, x.sum((0, 1), keepdim=True).expand_as(x))


def twice_used(state: Any) -> Any:
    x, *rest = state
    y = x * 1.1
    return (y.transpose(0, 1), *rest, y * 3.1, y.mean(0))


def used(state: Any) -> Any:
    x, *rest = state
    return (x, *rest, x * 0.7)


def whole_again(state: Any) -> Any:
    return tuple(t + 0.0 for t in state)


def linear() -> nn.Module:
    return OnFirst(nn.Linear(WIDTH, WIDTH))


def relu() -> nn.Module:
    return OnFirst(nn.ReLU(inplace=True))


def on(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return OnFirst(function)


def transposed() -> nn.Module:
    return on(lambda x: x.transpose(0, 1))


def turned_last() -> nn.Module:
    return on(lambda x: x.transpose(1, 2))


def flat() -> nn.Module:
    return on(lambda x: x.flatten(0, 1))


def unflat() -> nn.Module:
    return on(lambda x: x.unflatten(0, (2, 3)))


CHAINS: dict[str, Callable[[], Stages]] = {
    "found by chance": lambda: [linear(), turned, turned, turned, relu()],
    "one more view": lambda: [linear(), turned, turned, turned, turned, relu()],
    "a layer after it": lambda: [linear(), turned, turned, turned, relu(), linear(), turned],
    "written twice": lambda: [linear(), turned, turned, turned, on(lambda x: x.mul_(1.1)), turned, relu(), linear()],
    "a weight that scales in place": lambda: [linear(), turned, turned, turned, on(Scale()), linear()],
    "used in between": lambda: [linear(), transposed(), used, transposed(), used, on(Scale()), used, linear()],
    "two uses where the view was made": lambda: [linear(), twice_used, on(Scale()), linear()],
    "part of a tensor": lambda: [linear(), used, on(lambda x: x[:, 1:]), relu(), linear()],
    "the view of a linear layer": lambda: [linear(), relu(), transposed(), linear(), relu(), linear()],
    "a bias added in place": lambda: [linear(), on(Bias()), turned_last(), OnFirst(nn.Linear(3, 3)), on(torch.tanh)],
    "strides from outside": lambda: [linear(), relu(), turned_last(), OnFirst(nn.Linear(3, 3)), turned_last(), relu()],
    "a view again and again": lambda: [linear(), flat(), on(lambda x: x.mul_(1.1)), unflat(), relu(), flat(), linear()],
    "expanded, copied, written": lambda: [linear(), on(lambda x: x[:, :1].expand_as(x)), whole_again, relu(), linear()],
    "two stretches": lambda: [linear(), turned, turned, relu(), linear(), turned, turned, turned, relu()],
    "a view of the caller's tensor": lambda: [used, transposed(), used, transposed(), used, relu(), linear()],
    "no view": lambda: [on(lambda x: x * 1.5), used, relu(), on(lambda x: x * 2.0), used, on(Scale())],
}


def case_of(name: str, *, input_requires: bool = True) -> Case:
    # Plain PyTorch lets no one write into a view of a leaf that requires a gradient.
    input_requires = input_requires and "caller's" not in name
    return Case(CHAINS[name], rows(2, 3, WIDTH), lambda x: (x,), input_requires=input_requires)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "planner"), one_in(2, itertools.product(CHAINS, PLANNERS)))
def test_exact(name: str, planner: str) -> None:
    assert_exact(case_of(name), planner, "full" if planner == "store_all" else "least")


@pytest.mark.full
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", CHAINS)
def test_exact_at_every_level(name: str, planner: str, level: str) -> None:
    for input_requires in (True, False):
        assert_exact(case_of(name, input_requires=input_requires), planner, level)


def names_of(name: str) -> list[str]:
    case = case_of(name)
    return [stage.name for stage in called_once(case, case.stages())._stages]


@pytest.mark.parametrize(
    ("name", "stretches"),
    [
        ("two stretches", ["stages 1 to 3 ", "stages 5 to 8 "]),
        ("a bias added in place", ["stages 0 to 1 "]),
        ("the view of a linear layer", []),
        ("strides from outside", ["stages 4 to 5 "]),
        ("a view again and again", []),
        ("no view", []),
    ],
)
def test_no_more_stages_are_joined_than_needed(name: str, stretches: list[str]) -> None:
    found = [name for name in names_of(name) if "joined" in name]
    assert len(found) == len(stretches)
    for text, start in zip(found, stretches, strict=True):
        assert text.startswith(start)


def test_a_plan_of_joined_stages_serves_the_same_chain() -> None:
    case = case_of("found by chance")
    plan = called_once(case, case.stages()).plan
    assert plan is not None
    again = called_once(case, case.stages(), plan=plan).plan
    assert again is not None
    assert again.schedule == plan.schedule


def test_views_over_the_same_bytes_are_refused() -> None:
    def both(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y.transpose(0, 1)

    def write(state: Any) -> Any:
        return state[0].relu_(), state[1]

    with pytest.raises(InputError, match="shares memory"):
        Chain([both, write])(torch.randn(3, 3, requires_grad=True))
