"""A gradient of a gradient is exact or refused, never a constant."""

from typing import Any

import pytest
import torch
from exact import PLANNERS, plain
from models import mlp
from pairs import Pair, batch

from tapestream.errors import GradientError
from tapestream.frontends.chain import Chain


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_chain_refuses(planner: str) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    net = Chain(mlp(), planner=planner)
    with pytest.raises(GradientError, match="create_graph=True"):
        penalty(net, x)


def test_a_chain_refuses_a_backward_to_parameters() -> None:
    net = Chain(mlp())
    with pytest.raises(GradientError, match="create_graph=True"):
        net(torch.randn(3, 6)).sum().backward(create_graph=True)
    assert all(p.grad is None for p in net.parameters())


def test_the_chain_can_be_differentiated_once_after_refusing() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    stages = mlp()
    out = Chain(stages)(x).sum()
    with pytest.raises(GradientError, match="create_graph=True"):
        torch.autograd.grad(out, x, create_graph=True)
    (found,) = torch.autograd.grad(out, x)
    (expected,) = torch.autograd.grad(plain(stages)(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_chain_within_a_stage_of_a_chain() -> None:
    x = torch.randn(3, 6, requires_grad=True)
    inner, outer = mlp(2), mlp(2)
    within = Chain(inner)
    within(x)  # made ready: two chains cannot be profiled at once
    (found,) = torch.autograd.grad(Chain([within, *outer])(x).sum(), x)
    (expected,) = torch.autograd.grad(plain([*inner, *outer])(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_streamed_model_refuses(pair: Pair) -> None:
    with pytest.raises(GradientError, match="create_graph=True"):
        penalty(pair[1], batch().requires_grad_())
