"""Gradients that a program takes inside, of the first order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import compare, least
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import GradientError, InputError, TapestreamError

SIDE = 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIDE, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 1))


def given() -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 8 * SIDE).reshape(8, SIDE),)


def attack(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        z = x
        for _ in range(4):
            z = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(net(z).sum(), z)
            z = z + 0.01 * g.sign()
        return F.softplus(net(z.detach())).mean()

    return run


def langevin(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """With noise between, an intermediate that the energy closes over, and steps through which gradients flow."""

    def run(x: torch.Tensor) -> torch.Tensor:
        context = net(x)
        z = torch.zeros_like(x)
        for _ in range(3):
            leaf = z.detach().requires_grad_()
            energy = (net(leaf) * context).square()
            g = torch.autograd.grad(energy, leaf, torch.ones_like(energy))[0]
            z = z - 0.1 * g + 0.01 * torch.randn_like(z)
        return (net(z) - context).square().mean()

    return run


def several(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of an intermediate and of a parameter, unused ones among them."""
    (weight, bias), other = list(net[0].parameters()), torch.ones(3, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(F.linear(x, weight, bias))
        y = net[2](h)
        of_h, of_w, none = torch.autograd.grad(
            y.square().sum(), [h, weight, other], retain_graph=True, allow_unused=True
        )
        assert none is None
        (zero,) = torch.autograd.grad(h.sum(), [other], retain_graph=True, materialize_grads=True)
        return net[3](y).sum() + (of_h * h).sum() + (of_w * weight).sum() + zero.sum()

    return run


def under_autocast(net: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    run = attack(net)

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).float()

    return cast


@pytest.mark.thinned(3)
@pytest.mark.parametrize("planner", ["revolve", "auto"])
@pytest.mark.parametrize("share", [None, 2.0, 1.0])
@pytest.mark.parametrize("way", [attack, langevin, several, under_autocast])
def test_they_are_exact(way: Any, share: float | None, planner: str) -> None:
    net = network()
    function, leaves = way(net), list(net.parameters())
    budget = None if share is None else int(share * least(function, leaves, given, 0))
    compare(function, leaves, given, budget, planner=planner, calls=3, reruns=share == 1.0)


def test_memory_stays_within_the_budget() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    x = torch.ones(128, 64)

    def run(x: torch.Tensor) -> torch.Tensor:
        z = x
        for _ in range(6):
            z = z.detach().requires_grad_()
            z = z + 0.1 * torch.autograd.grad(net(z).sum(), z)[0]
        return net(z.detach()).square().mean()

    budget = least(run, list(net.parameters()), lambda: (x,), 0)
    program = ts.Program(run, budget=budget)
    for _ in range(2):
        program(x).backward()
    net.zero_grad()
    with ts.track_memory() as meter:
        program(x).backward()
    gradients = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    assert meter.peak_nbytes - gradients <= 1.02 * budget + 16_384


class GradientOf(torch.autograd.Function):
    """A gradient as an operation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, net: Any, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.net = net
        ctx.save_for_backward(x, *parameters)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(net(x).sum(), x)[0]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(ctx.net(x).sum(), x, create_graph=True)
            return None, *torch.autograd.grad(inner, [x, *parameters], cotangents[0], allow_unused=True)


@pytest.mark.parametrize("share", [None, 1.5, 1.0])
def test_a_function_that_differentiates_in_its_forward(share: float | None) -> None:
    net = network()

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x - 0.1 * GradientOf.apply(net, x, *net.parameters())
        return net(x).square().mean()

    leaves = list(net.parameters())
    budget = None if share is None else int(share * least(run, leaves, given, 0))
    compare(run, leaves, given, budget, calls=3, reruns=share == 1.0)


def second_order(net: nn.Module, z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(net(z).sum(), z, create_graph=True)[0].square().sum()


def with_dropout(net: nn.Module, z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(F.dropout(net(z), 0.5).sum(), z)[0].sum()


def in_place(net: nn.Module, z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(net(z).mul_(2.0).sum(), z)[0].sum()


def backward(net: nn.Module, z: torch.Tensor) -> torch.Tensor:
    net(z).sum().backward()
    return z.sum()


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (second_order, "with create_graph=True, which a program does not take; a ts.Loop or ts.Chain takes"),
        (with_dropout, "draws random numbers"),
        (in_place, "writes into tensors"),
        (backward, "the program calls backward itself"),
    ],
)
def test_what_is_refused_says_what_does(way: Any, said: str) -> None:
    net = network()

    def run(x: torch.Tensor) -> torch.Tensor:
        return way(net, x.detach().requires_grad_()) + net(x).sum()

    with pytest.raises(TapestreamError, match=said) as refused:
        ts.Program(run, budget="1MiB")(*given())
    assert isinstance(refused.value, (InputError, GradientError))


@pytest.mark.parametrize("way", [second_order, with_dropout])
def test_what_they_are_told_works(way: Any) -> None:
    net = network()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + way(net, x.detach().requires_grad_()) * net(x)

    wanted = []
    for run in (lambda x: step(step(x)), ts.Chain([step, step], budget="1MiB")):
        torch.manual_seed(0)
        net.zero_grad()
        run(*given()).sum().backward()
        wanted.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*wanted, strict=True))
