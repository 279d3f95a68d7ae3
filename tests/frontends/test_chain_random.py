"""Random chains of random stages, under random planners and budgets: exact, or refused."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exact import PLANNERS, assert_same, plain, train
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import Again, Attention, Case, Checkpointed, Force, Noisy, rows
from torch import nn

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.chain import Chain

WIDTH = 4


class OnFirst(nn.Module):
    """A layer on the first tensor of the state (x, older tensors)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: Any) -> Any:
        x, *rest = state
        return (self.layer(x), *rest)


def push(state: Any) -> Any:
    return (*state, state[0])


def pop(state: Any) -> Any:
    x, *rest = state
    return (x + 0.5 * rest[-1], *rest[:-1]) if rest else (x * 1.5,)


def halve(state: Any) -> Any:
    x, *rest = state
    return (F.dropout(x, 0.5), *rest)


def view(state: Any) -> Any:
    x, *rest = state
    return (x.transpose(0, 1).contiguous().transpose(0, 1), *rest, x.sum((0, 1), keepdim=True).expand_as(x))


LAYERS = {
    "linear": lambda shared: nn.Linear(WIDTH, WIDTH),
    "tanh": lambda shared: nn.Tanh(),
    "relu": lambda shared: nn.ReLU(inplace=True),
    "again": lambda shared: Again(shared.weight),
    "shared": lambda shared: shared,
    "attention": lambda shared: Attention(WIDTH, dropout=0.1),
    "noisy": lambda shared: Noisy(WIDTH),
    "force": lambda shared: Force(WIDTH),
    "checkpointed": lambda shared: Checkpointed(WIDTH),
    "norm": lambda shared: nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDTH), nn.Unflatten(0, (2, 3))),
    "frozen": lambda shared: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "rrelu": lambda shared: nn.RReLU(),
}
FUNCTIONS = {"push": push, "pop": pop, "halve": halve, "view": view}


def stages_of(kinds: list[str]) -> list[Any]:
    shared = nn.Linear(WIDTH, WIDTH)
    return [FUNCTIONS[kind] if kind in FUNCTIONS else OnFirst(LAYERS[kind](shared)) for kind in kinds]


@example(
    kinds=["linear", "view", "view", "view", "relu"], planner="store_all", share=1.0, requires=False, autocast=False
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from([*LAYERS, *FUNCTIONS]), min_size=1, max_size=7),
    planner=st.sampled_from(PLANNERS),
    share=st.sampled_from([1.0, 0.7, 0.4, 0.0]),
    requires=st.booleans(),
    autocast=st.booleans(),
)
def test_random_chains(kinds: list[str], planner: str, share: float, requires: bool, autocast: bool) -> None:
    case = Case(lambda: stages_of(kinds), rows(2, 3, WIDTH), lambda x: (x,), input_requires=requires, autocast=autocast)
    ours, theirs = case.stages(), case.stages()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = train(plain(theirs), theirs, case, 2)
        except RuntimeError as error:  # nothing to differentiate, or written in place where it may not be
            assert "does not require grad" in str(error) or "in-place" in str(error) or "inplace" in str(error)  # noqa: PT017
            return
        stored = Chain(case.stages(), planner="store_all")
        x = case.batch().requires_grad_(requires)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                stored((x,))
        except InputError as error:
            assert "shares memory with another tensor of that state" in str(error)  # noqa: PT017
            return
        if stored.plan is None:
            pytest.fail("the chain made no plan although plain PyTorch differentiates it")
        budget = max(1, int(share * stored.plan.peak_nbytes))
        try:
            found = train(Chain(ours, planner=planner, budget=budget), ours, case, 2)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            ours = case.stages()
            found = train(Chain(ours, planner=planner, budget=error.least_nbytes + 4096), ours, case, 2)
    assert_same(expected, found)
