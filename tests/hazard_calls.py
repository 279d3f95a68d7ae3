"""The networks of `hazards.py`, run plainly and by every front-end."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from hazards import DEPTH, TOGETHER, WIDTH, Net, begun, ended, net_of
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError

ROWS = 4
FRONTENDS = ("chain", "loop", "stream", "program")
BY_AUTO = "program by auto"  # which plans better for the second and third call
D, K = ts.Tier.DEVICE, ts.Tier.DISK
DIRECT = ts.Machine(links={(D, K): ts.Link(1e9), (K, D): ts.Link(1e9)})
Call = Callable[[torch.Tensor], torch.Tensor]
Trace = dict[str, torch.Tensor | None]
T = TypeVar("T")


def looped(net: Net, kind: str) -> tuple[nn.Module, int]:
    """What a `Loop` repeats, and how often, and what plain PyTorch runs beside it."""
    return (net, 4) if kind in TOGETHER else (net.blocks[0], 2 * DEPTH)


def first_state(kind: str, x: torch.Tensor) -> Any:
    """What the first step of a loop is given."""
    return begun(x) if kind == "a skip of three" else x


def plainly(net: Net, kind: str, frontend: str) -> Call:
    """The same by plain PyTorch."""
    if not frontend.startswith("loop"):
        return net

    def run(x: torch.Tensor) -> torch.Tensor:
        step, steps = looped(net, kind)
        state = first_state(kind, x)
        for _ in range(steps):
            state = step(state)
        return ended(state)

    return run


class Repeated:
    """One step again and again, by a `Loop` with these options."""

    def __init__(self, net: Net, kind: str, **options: Any) -> None:
        step, self.steps = looped(net, kind)
        self.loop, self.kind = ts.Loop(step, **options), kind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ended(self.loop(first_state(self.kind, x), steps=self.steps))


def through(net: Net, kind: str, frontend: str, budget: int, folder: Path, **options: Any) -> Call:
    """The same by one of FRONTENDS, or BY_AUTO, within ``budget`` bytes; ``options`` are for all but a program."""
    if frontend == "chain":
        return ts.Chain(list(net.blocks), budget=budget, **options)
    if frontend == "loop":
        return Repeated(net, kind, budget=budget, **options)
    if frontend == "stream":
        ts.stream(
            net,
            device="cpu",
            budget=budget,
            home="disk",
            folder=folder,
            machine=DIRECT,
            engine="adversarial",
            blocks=list(net.blocks),
            **options,
        )
        return net
    return ts.Program(net, budget=budget, planner="auto" if frontend == BY_AUTO else "revolve")


def drawn(number: int) -> torch.Tensor:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    return torch.randn(ROWS, WIDTH)


def steps(call: Call, net: Net, *, batches: int = 3) -> Trace:
    """What batches leave behind; the second adds to the gradients of the first, weights change before the third."""
    trace: Trace = {}
    for number in range(batches):
        x = drawn(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=net.autocast):
            y = call(x)
        y.float().square().sum().backward()
        trace[f"{number} result"] = y.detach().clone()
        trace |= {
            f"{number} gradient {n}": None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()
        }
        trace |= {f"{number} buffer {n}": b.clone() for n, b in net.named_buffers()}
        if number == 1:
            with torch.no_grad():
                for p in net.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
                        p.grad = None
    return trace | {"generator": torch.get_rng_state(), "numbers": torch.tensor([random.random(), numpy.random.rand()])}


def assert_same(expected: Trace, found: Trace) -> None:
    """Every bit."""
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or other is None or torch.equal(tensor, other), name


def tightly(kind: str, frontend: str, folder: Path, use: Callable[[Call, Net], T]) -> tuple[T, int]:
    """What ``use`` gives with the least budget that works, the one which the errors of smaller ones name; and that."""
    budget = 1
    for attempt in range(6):
        net = net_of(kind)
        call = through(net, kind, frontend, budget, folder / str(attempt))
        try:
            return use(call, net), budget
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert error.least_nbytes > budget  # noqa: PT017
            budget = error.least_nbytes
        finally:
            if frontend == "stream":
                ts.unstream(net)
    raise AssertionError("no budget named by an error works")


def assert_ran_again(call: Call, net: Net) -> None:
    """The budget was so small that some of the last call ran twice."""
    if isinstance(call, ts.Program):
        assert call.report is not None
        assert call.report.reruns > 0
        return
    if isinstance(call, Repeated):
        plan = call.loop.plan
    else:
        plan = call.plan if isinstance(call, ts.Chain) else ts.report(net).plan
    assert plan is not None
    assert plan.simulation.forwards > plan.simulation.recorded


def assert_as_plain(kind: str, frontend: str, folder: Path, trace: Callable[[Call, Net], Trace]) -> int:
    """What ``trace`` finds is plain PyTorch's to the last bit, at the least budget, where something ran again; gives
    that budget."""
    theirs = net_of(kind)
    expected = trace(plainly(theirs, kind, frontend), theirs)

    def use(call: Call, net: Net) -> None:
        assert_same(expected, trace(call, net))
        assert_ran_again(call, net)

    return tightly(kind, frontend, folder, use)[1]
