"""Gradients of gradients through a streamed model, in the ways in which they are taken: plain PyTorch's bits, or
refused with a budget that works."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, WIDTH, rows, streamed
from exact import Trace, assert_same, copy_of
from things_kept import alive, whole_peak
from torch import nn

from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of

pytestmark = pytest.mark.on_cpu("bytes of the CPU are measured")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus()) for _ in range(5)])


def gradient_penalty(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    """As for the critic of a GAN: at points between real and made ones."""
    x = rows(1).lerp(rows(2), 0.3).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def product_with_the_hessian(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    slopes = torch.autograd.grad(model(rows(1)).square().mean(), weights, create_graph=True)
    ones = [torch.full_like(w, 0.1) for w in weights]
    return torch.stack([(g * v).sum() for g, v in zip(slopes, ones, strict=True)]).sum()


def by_the_input_twice(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    x = rows(1).requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return second.square().mean()


def backward_with_a_graph(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    """By ``backward``, whose gradients have a graph then."""
    model(rows(1)).square().mean().backward(create_graph=True)
    total = torch.stack([w.grad.square().sum() for w in weights if w.grad is not None]).sum()
    for w in weights:
        w.grad = None
    return total


def some_weights(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    slopes = torch.autograd.grad(model(rows(1)).square().mean(), weights[:2], create_graph=True)
    return torch.stack([g.abs().sum() for g in slopes]).sum()


def beside_the_loss(model: Any, weights: list[nn.Parameter]) -> torch.Tensor:
    x = rows(1).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + 0.1 * slope.square().mean()


WAYS = (
    gradient_penalty, product_with_the_hessian, by_the_input_twice, backward_with_a_graph, some_weights,
    beside_the_loss,
)  # fmt: skip


def gradients(model: Any, way: Callable[..., torch.Tensor]) -> Trace:
    model.zero_grad()
    loss = way(model, list(model.parameters()))
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": copy_of(loss)} | {name: copy_of(p.grad) for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_exact_within_the_budget_that_is_named(way: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    expected, budget = gradients(net(), way), 1
    with streamed(net, "device", tmp_path, AMPLE) as model:
        assert_same(expected, gradients(model, way))
    gc.collect()
    base = alive()
    for _ in range(8):
        try:
            with streamed(net, "device", tmp_path, budget) as model:
                found = gradients(model, way)
                assert_same(expected, found)
                sizes = sum(t.nbytes for t in found.values() if t is not None)
                peak = whole_peak(lambda: gradients(model, way), base + 2 * sizes)
                assert peak <= limit_of(budget)
                return
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = max(error.least_nbytes, budget + 1)
    raise AssertionError("each budget named was refused in turn")
