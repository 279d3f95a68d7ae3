"""torch.func's transforms and forward-mode differentiation, inside of what runs again: plain PyTorch's bits; around it:
refused by name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from all_fronts import FRONTS, Layer, W, run_of
from reaching import Network
from torch import nn
from torch.autograd import forward_ad

import tapestream as ts
from tapestream.errors import BudgetError, InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch scripts what it differentiates

WIDTH, STAGES = 6, 5
Inner = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


def dual(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What takes no tangent for a zero one."""
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v)))
    return torch.zeros_like(value) if tangent is None else tangent


INNER: dict[str, Inner] = {
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "vmap": lambda f, x, v: torch.func.vmap(f)(x),
    "dual": dual,
    "vjp": lambda f, x, v: torch.func.vjp(f, x)[1](v)[0],
    "jacrev": lambda f, x, v: torch.func.jacrev(f)(x[0]).sum(0) + x,
    "grad": lambda f, x, v: torch.func.grad(lambda z: f(z).square().sum())(x),
    "hessian": lambda f, x, v: torch.func.hessian(lambda z: f(z).sum())(x[0]).sum(0) + x,
    "per sample": lambda f, x, v: torch.func.vmap(torch.func.grad(lambda z: f(z).square().sum()))(x),
}


class Block(nn.Module):
    def __init__(self, inner: Inner, direction: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.inner, self.direction = nn.Linear(WIDTH, WIDTH), inner, direction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * self.inner(lambda z: torch.tanh(self.layer(z)), x, self.direction)


def run(front: str, how: str, budget: int | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [Block(INNER[how], torch.randn(4, WIDTH)) for _ in range(STAGES)]
    x, net = torch.randn(4, WIDTH, requires_grad=True), Network(blocks)
    called: Callable[[torch.Tensor], Any] = net
    if front == "Loop":
        called = lambda x: [x := blocks[0](x) for _ in range(STAGES)][-1]  # noqa: E731
    if budget is not None:
        if front == "Loop":
            looped = ts.Loop(blocks[0], budget=budget)
            called = lambda x: looped(x, steps=STAGES)  # noqa: E731
        elif front == "Chain":
            called = ts.Chain(blocks, budget=budget)
        else:
            called = ts.stream(net, device="cpu", budget=budget, home="device")
    loss = called(x).square().sum()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("front", ["Chain", "Loop", "stream"])
def test_inside(front: str, how: str) -> None:
    wanted, budget = run(front, how, None), 1
    for _ in range(5):
        try:
            found = run(front, how, budget)
            break
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert all(map(torch.equal, run(front, how, 2**20), wanted))


def sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def in_dual(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with forward_ad.dual_level():
        run(forward_ad.make_dual(torch.ones(3), torch.ones(3)))


AROUND: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], object]] = {
    "vmap": lambda run: torch.func.vmap(run)(torch.ones(2, 3)),
    "jvp": lambda run: torch.func.jvp(run, (torch.ones(3),), (torch.ones(3),)),
    "dual": in_dual,
}


@pytest.mark.parametrize("how", AROUND)
@pytest.mark.parametrize("front", ["Chain", "Join", "Loop", "stream"])
def test_around(front: str, how: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(3))))
    made: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
        "Chain": lambda: ts.Chain([sine, sine], budget="1MiB"),
        "Join": lambda: lambda x: ts.Join([[sine], [sine]], torch.mul, budget="1MiB")(x, x),
        "Loop": lambda: lambda x: ts.Loop(sine)(x, steps=3),
        "stream": lambda: ts.stream(net, device="cpu", budget="1MiB", home="device"),
    }
    with pytest.raises(InputError, match=r"torch\.func .* forward-mode"):
        AROUND[how](made[front]())


def batched(run: Callable[[Any], Any]) -> torch.Tensor:
    """Rows of a Jacobian, at once."""
    x = torch.linspace(-1, 1, 2 * W).view(2, W).requires_grad_()
    y = run(x)
    rows = torch.eye(y.numel()).view(-1, *y.shape)
    (found,) = torch.autograd.grad(y, x, rows, is_grads_batched=True)
    return found


@pytest.mark.filterwarnings("ignore::tapestream.errors.BudgetExceeded")  # many rows take more than one
@pytest.mark.parametrize("front", FRONTS)
def test_cotangents_in_batches_are_exact(front: str, tmp_path: Path) -> None:
    """By a call that is the first one, and by one whose plan is known. What many rows take more than one, the next call
    of a Join is planned for, and a budget for one row is then too small by name."""
    for budget in (2**20,) if front == "Join" else (None, 2**20):
        torch.manual_seed(0)
        stages: list[Any] = [Layer(lambda layer, x: torch.tanh(layer.lin(x))) for _ in range(4)]
        stages = stages[:1] * 3 if front == "Loop" else stages
        expected = batched(copy.deepcopy(Network(stages)))
        run = run_of(front, stages, torch.zeros(2, W, requires_grad=True), tmp_path, budget)
        for _ in range(2):
            torch.testing.assert_close(batched(run), expected, rtol=0, atol=0)
