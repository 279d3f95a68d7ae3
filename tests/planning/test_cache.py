"""Plans by shapes: which serve which inputs, and that the budget holds at lengths that come as they like."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.planning.cache import ByShape
from tapestream.storage.meter import track_memory


def found(known: list[tuple[int, ...]], asked: tuple[int, ...]) -> tuple[int, ...] | None:
    """Which of the ``known`` shapes serves the one asked for."""
    plans: ByShape[tuple[int, ...]] = ByShape()
    for shape in known:
        plans.add("kind", (torch.Size(shape),), shape)
    return plans.find("kind", (torch.Size(asked),))


@pytest.mark.parametrize(
    ("known", "asked", "serves"),
    [
        ([(100,), (120,)], (100,), (100,)),
        ([(120,), (100,)], (90,), (100,)),
        ([(100,), (120,)], (110,), (120,)),
        ([(100,)], (75,), (100,)),
        ([(100,)], (74,), None),
        ([(100,)], (101,), None),
        ([(10, 8)], (9, 7), (10, 8)),
        ([(10, 8)], (8, 7), None),  # fewer than 60 of 80 elements
        ([(10, 8)], (8, 9), None),
        ([(4, 1)], (3, 1), (4, 1)),
    ],
)
def test_a_plan_serves_shapes_a_little_smaller(
    known: list[tuple[int, ...]], asked: tuple[int, ...], serves: tuple[int, ...] | None
) -> None:
    assert found(known, asked) == serves


def test_a_size_of_one_is_not_just_a_smaller_one() -> None:
    plans: ByShape[str] = ByShape()
    plans.add("kind", (torch.Size([100]), torch.Size([3])), "plan")
    assert plans.find("kind", (torch.Size([100]), torch.Size([2]))) == "plan"
    assert plans.find("kind", (torch.Size([100]), torch.Size([1]))) is None


class Attention(nn.Module):
    """Scores in full, ``window`` positions wide at most: bytes grow with the square of the length, then with the
    length."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.linear = window, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + torch.tanh(y @ y[-self.window :].T) @ y[-self.window :] / self.window


def step(chain: ts.Chain, x: torch.Tensor) -> None:
    out = chain(x)
    root = torch.autograd.graph.get_gradient_edge(out)
    cotangent = torch.ones_like(out)
    del out
    torch.autograd.backward([root], [cotangent])


@pytest.mark.parametrize("window", [10**6, 128])
def test_the_budget_holds_at_every_length(window: int) -> None:
    torch.set_num_threads(1)
    stages: list[Callable[..., object]] = [Attention(window) for _ in range(6)]
    longest = torch.randn(512, 8, requires_grad=True)
    generous = ts.Chain(stages, budget="1 GiB")
    generous(longest)
    assert generous.plan is not None
    chain = ts.Chain(stages, budget=generous.plan.peak_nbytes // 2)
    limit = chain.budget.device_nbytes
    assert limit is not None
    planned = set()
    for length in random.Random(1).choices(range(32, 513), k=40):
        x = torch.randn(length, 8, requires_grad=True)
        step(chain, x)
        chain.zero_grad()
        x.grad = None
        with track_memory() as meter:
            step(chain, x)
        gradients = sum(p.nbytes for p in chain.parameters()) + 2 * x.nbytes  # that of x, and the result's cotangent
        assert chain.plan is not None
        assert meter.peak_nbytes - gradients <= limit, length
        assert chain.plan.peak_nbytes <= limit
        planned.add(id(chain.plan))
    assert len(planned) < 20
