"""Gradients of a chain that come to ones that are there already: one sum, in plain PyTorch's order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_sides import WIDTH, rows
from exact import Trace, assert_same, copy_of
from torch import nn

import tapestream as ts

COUNT = 5
Backward = Callable[[Callable[[torch.Tensor], torch.Tensor], nn.Module], None]


def several_batches(call: Any, net: nn.Module) -> None:
    for number in range(3):
        call(rows(number)).square().mean().backward()


def zeros_to_begin_with(call: Any, net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    several_batches(call, net)


def made_by_hand(call: Any, net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = torch.full_like(p, 1e-3)
    call(rows()).square().mean().backward()


def of_some(call: Any, net: nn.Module) -> None:
    for p in [*net.parameters()][::2]:
        p.grad = torch.full_like(p, 1e-3)
    several_batches(call, net)


def of_a_penalty_before(call: Any, net: nn.Module) -> None:
    torch.stack([p.square().sum() for p in net.parameters()]).sum().backward()
    several_batches(call, net)


def of_a_penalty_beside(call: Any, net: nn.Module) -> None:
    penalty = torch.stack([p.square().sum() for p in net.parameters()]).sum()
    (call(rows()).square().mean() + penalty).backward()


def plain_calls_in_turn(call: Any, net: nn.Module) -> None:
    """The same modules, called without the chain as well."""
    for number in range(2):
        call(rows(number)).square().mean().backward()
        net(rows(number + 5)).square().mean().backward()


def two_losses_of_two_calls(call: Any, net: nn.Module) -> None:
    first, second = call(rows(1)).square().mean(), call(rows(2)).square().mean()
    (0.3 * first).backward()
    (0.7 * second).backward()


def one_backward_of_two_calls(call: Any, net: nn.Module) -> None:
    (call(rows(1)).square().mean() - call(rows(2)).abs().mean()).backward()
    several_batches(call, net)


def parts_of_one_tensor(call: Any, net: nn.Module) -> None:
    """As people lay gradients out who sum them over processes."""
    flat = torch.full((sum(p.numel() for p in net.parameters()),), 1e-3)
    for p, part in zip(net.parameters(), flat.split([p.numel() for p in net.parameters()]), strict=True):
        p.grad = part.view_as(p)
    several_batches(call, net)
    flat *= 0.5  # still where they are


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def seen_by_hooks(call: Any, net: nn.Module) -> None:
    for p in net.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
        p.register_post_accumulate_grad_hook(double)
    several_batches(call, net)


def without_none(call: Any, net: nn.Module) -> None:
    several_batches(call, net)
    net.zero_grad(set_to_none=False)
    several_batches(call, net)


WAYS: tuple[Backward, ...] = (
    several_batches, zeros_to_begin_with, made_by_hand, of_some, of_a_penalty_before, of_a_penalty_beside,
    plain_calls_in_turn, two_losses_of_two_calls, one_backward_of_two_calls, parts_of_one_tensor, seen_by_hooks,
    without_none,
)  # fmt: skip


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(COUNT)])


def gradients(model: nn.Module) -> Trace:
    return {name: copy_of(p.grad) for name, p in model.named_parameters()}


def least_of(planner: str) -> int:
    with pytest.raises(ts.BudgetError) as refused:
        ts.Chain(list(net()), planner=planner, budget=1)(rows())
    assert refused.value.least_nbytes is not None
    return 4 * refused.value.least_nbytes  # two calls live together


@pytest.mark.parametrize("planner", ["store_all", "revolve"])
@pytest.mark.parametrize("way", WAYS)
def test_one_sum(way: Backward, planner: str) -> None:
    plain, ours = net(), net()
    way(plain, plain)
    way(ts.Chain(list(ours), planner=planner, budget=least_of(planner)), ours)
    assert_same(gradients(plain), gradients(ours))


@pytest.mark.parametrize("way", WAYS)
def test_within_the_chain_s_gradients(way: Backward) -> None:
    """``gradients_within``: the budget counts them."""
    plain, ours = net(), net()
    way(plain, plain)
    way(ts.Chain(list(ours), gradients_within=True, budget="1 MiB"), ours)
    assert_same(gradients(plain), gradients(ours))
