"""Random networks whose modules keep things from one call to the next: by attributes, containers, hooks, contexts.

What a call holds, at a random budget that works, stays within it, with plain PyTorch's bits; where it does not, the
call says so.
"""

import functools
import random
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of
from tapestream.ir import Tier
from tapestream.planning.exceeded import limit_of
from tapestream.storage.meter import watch_memory

STEPS = 6  # of a loop
EVERYWHERE: dict[int, torch.Tensor] = {}


class Wave(torch.autograd.Function):
    """Keeps a tensor on its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.wave = x.repeat(1, 2)
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.5 + 0 * ctx.wave[:, : gradients[0].shape[1]]


class Pair(NamedTuple):
    """An object that holds tensors."""

    first: torch.Tensor
    second: dict[str, torch.Tensor]


class Block(nn.Module):
    """A layer of some operations that ``keeps`` something."""

    def __init__(self, width: int, keeps: str, operations: int) -> None:
        super().__init__()
        self.linear, self.keeps, self.operations = nn.Linear(width, width), keeps, operations
        self.seen: list[torch.Tensor] = []
        self.table: dict[Any, torch.Tensor] = {}
        self.last: Any = None
        if keeps == "a buffer":
            self.register_buffer("mean", torch.zeros(1))
        if keeps.startswith("by a hook"):
            self.linear.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.table["out"] = out if self.keeps == "by a hook" else out.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        for _ in range(self.operations):
            y = torch.sin(y)
        if self.keeps == "on a context":
            y = Wave.apply(y)  # type: ignore[no-untyped-call]
        keep = KEEPS.get(self.keeps)
        if keep is not None:
            keep(self, x, y)
        return x + y


def _attribute(make: Callable[[torch.Tensor], Any]) -> Callable[[Block, torch.Tensor, torch.Tensor], None]:
    return lambda block, _, y: setattr(block, "last", make(y))


KEEPS: dict[str, Callable[[Block, torch.Tensor, torch.Tensor], Any]] = {
    "its result": _attribute(lambda y: y),
    "its result, detached": _attribute(torch.Tensor.detach),
    "a copy": _attribute(lambda y: y.detach().clone()),
    "another result": _attribute(torch.exp),
    "an object": _attribute(lambda y: Pair(y.detach(), {"copy": y.detach().clone()})),
    "a partial": _attribute(lambda y: functools.partial(print, y.detach().clone())),
    "an array": _attribute(lambda y: y.detach().clone().numpy()),
    "on a parameter": lambda block, _, y: setattr(block.linear.weight, "kept", y.detach().clone()),
    "a list": lambda block, _, y: block.seen.__setitem__(slice(None), [y.detach()]),
    "a list of results": lambda block, _, y: block.seen.__setitem__(slice(None), [y]),
    "a table": lambda block, x, y: block.table.__setitem__(tuple(x.shape), torch.cat((y, y), 1).detach()),
    "a buffer": lambda block, _, y: setattr(block, "mean", y.detach() * 0.5),
    "in a global": lambda block, _, y: EVERYWHERE.__setitem__(id(block), y.detach().clone()),
}
KINDS = (*KEEPS, "on a context", "by a hook", "by a hook, detached")


class Net:
    """The same for the same seed."""

    def __init__(self, seed: int) -> None:
        EVERYWHERE.clear()
        chosen = random.Random(seed)
        torch.manual_seed(seed)
        width, rows, share = chosen.choice((32, 64, 128)), chosen.choice((64, 128, 256)), chosen.random()
        self.net = nn.Sequential(*(
            Block(width, chosen.choice(KINDS) if chosen.random() < share else "nothing", chosen.randint(0, 3))
            for _ in range(chosen.randint(4, 12))
        ))  # fmt: skip
        self.x = torch.randn(rows, width)

    def plain(self, steps: int = 1) -> torch.Tensor:
        x = self.x
        for _ in range(steps):
            x = self.net(x)
        return x.sum()

    def trained(self, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """What two steps give."""
        found: list[torch.Tensor] = []
        for _ in range(2):
            self.net.zero_grad()
            value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
            found += [value.detach().clone(), *gradients, *(b.clone() for b in self.net.buffers())]
        return found

    def held_nbytes(self, loss: Callable[[], torch.Tensor]) -> int:
        """At the peak of a step, without its gradients; what the step before has left was there before."""
        with watch_memory() as watch:
            for _ in range(2):  # what the first makes, and the second frees, is known to the meter
                self.net.zero_grad()
                with watch.measured() as meter:
                    loss().backward()  # type: ignore[no-untyped-call]
        return meter.peak_nbytes - sum(p.grad.nbytes for p in self.net.parameters() if p.grad is not None)


def _by(front: str, net: Net, budget: int, folder: str) -> Callable[[], torch.Tensor]:
    if front == "Chain":
        chain = ts.Chain(list(net.net), budget=budget)
        return lambda: chain(net.x).sum()
    if front == "Loop":
        loop = ts.Loop(net.net, budget=budget)
        return lambda: loop(net.x, steps=STEPS).sum()
    if front == "Program":
        return ts.Program(net.plain, budget=budget)
    ts.stream(net.net, device="cpu", budget=budget, home="disk", folder=folder)
    return net.plain


def _working(front: str, seed: int, folder: str) -> tuple[Net, int, Callable[[], torch.Tensor], list[torch.Tensor]]:
    """At so many times a least budget: what works, and what it gives."""
    factor, budget = random.Random(-seed).choice((1.0, 1.1, 1.3, 2.0)), 1
    for _ in range(5):
        net = Net(seed)
        try:
            loss = _by(front, net, budget, folder)
            return net, budget, loss, net.trained(loss)
        except ts.BudgetError as error:
            budget = max(int(factor * (error.least_nbytes or 0)), budget + 1)
            if front == "stream":
                ts.unstream(net.net)
    raise AssertionError(f"each budget named was refused in turn, the last {budget}")


@pytest.mark.filterwarnings("ignore::tapestream.BudgetExceeded")  # of first calls, whose plans do not know yet
@pytest.mark.parametrize("front", ["Chain", "Loop", "Program", "stream"])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 300), marks=pytest.mark.full)], ids=str)
@pytest.mark.timeout(1800)
def test_a_call_stays_within_its_budget(front: str, seeds: range) -> None:
    for seed in seeds:
        plain = Net(seed)
        wanted = plain.trained(lambda plain=plain: plain.plain(STEPS if front == "Loop" else 1))  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as folder:
            net, budget, loss, found = _working(front, seed, folder)
            assert all(map(torch.equal, found, wanted)), seed
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                net.net.zero_grad()
                pool = handle_of(net.net).pool.held_nbytes(Tier.DEVICE) if front == "stream" else 0
                held = pool + net.held_nbytes(loss)
            exceeded = [one for one in said if issubclass(one.category, ts.BudgetExceeded)]
            assert bool(exceeded) is (held > limit_of(budget)), (seed, held, budget)
            if front == "stream":
                ts.unstream(net.net)
