"""The silent failures known in this field, through every front-end: the bits of plain PyTorch, or an error that names
the cause; never a wrong gradient.

Each network is taken as the stages of a `Chain`, as the step of a `Loop` (stages that are the same every time), as the
blocks of a streamed model, and as one function by `Program`, at budgets under which much is computed again.
"""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.program.program import Program

WIDTH, ROWS, DEPTH = 32, 4, 6
FRONTENDS = ("chain", "loop", "stream", "program")
D, K = ts.Tier.DEVICE, ts.Tier.DISK
DIRECT = ts.Machine(links={(D, K): ts.Link(1e9), (K, D): ts.Link(1e9)})
Call = Callable[[torch.Tensor], torch.Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Blocks one after the other; autocast around all of them where asked for."""

    def __init__(self, blocks: list[nn.Module], autocast: bool = False) -> None:
        super().__init__()
        self.blocks, self.autocast = nn.ModuleList(blocks), autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    """One linear map, and what may go wrong after it."""

    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.linear, self.after = nn.Linear(WIDTH, WIDTH), nn.Sequential(*after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.linear(x))  # type: ignore[no-any-return]


class Drawn(nn.Module):
    """Multiplies by what Python and NumPy draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * (0.5 + random.random()) * float(numpy.random.uniform(0.5, 1.5))


class Single(nn.Module):
    """To single precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class Adapted(nn.Module):
    """A frozen map with a small trainable one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class OnContext(torch.autograd.Function):
    """Keeps its tensors as attributes of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.scale = x, scale
        return torch.sin(x) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * torch.cos(ctx.x) * ctx.scale, None


class Scaled(nn.Module):
    """A Function that keeps its tensors on the context, one of them the parameter of a block that may be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OnContext.apply(self.linear(x), self.scale)  # type: ignore[no-any-return, no-untyped-call]


class Refilling(nn.Module):
    """Writes into what it is given, and fills one buffer anew at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scratch", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            self.scratch.copy_(y.mean(0))
        y = y + self.scratch
        return y.mul_(0.9).clamp_(min=-0.8)


class Alike(nn.Module):
    """Every block takes the weight of the one before it."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if weight is not None:
            self.linear.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        return functional.linear(y, self.linear.weight) * 0.5


def tied() -> list[nn.Module]:
    first = Alike()
    return [first, *(Alike(first.linear.weight) for _ in range(DEPTH - 1))]


def norm() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, momentum=0.3)


class Skipping(nn.Module):
    """Gives on what the first block was given; the last one needs it again."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, state: Any) -> Any:
        x, first = state if isinstance(state, tuple) else (state, torch.sin(state))
        x = torch.tanh(self.linear(x))
        return x * first + first if self.last else (x, first)


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "dropout": lambda: [Block(nn.Dropout(0.3), nn.Tanh()) for _ in range(DEPTH)],
    "rrelu": lambda: [Block(nn.RReLU(), nn.Dropout(0.1)) for _ in range(DEPTH)],
    "rrelu in place": lambda: [Block(nn.RReLU(inplace=True)) for _ in range(DEPTH)],
    "python's and numpy's numbers": lambda: [Block(Drawn()) for _ in range(DEPTH)],
    "batch norm": lambda: [Block(norm(), nn.Tanh()) for _ in range(DEPTH)],
    "batch norm and relu in place": lambda: [Block(norm(), nn.ReLU(inplace=True)) for _ in range(DEPTH)],
    "autocast": lambda: [Block(nn.LayerNorm(WIDTH), nn.GELU(), Single()) for _ in range(DEPTH)],
    "frozen": lambda: [Block(nn.Tanh()).requires_grad_(k % 2 == 1) for k in range(DEPTH)],
    "frozen first": lambda: [Block(nn.Tanh()).requires_grad_(k > 2) for k in range(DEPTH)],
    "adapters": lambda: [Adapted() for _ in range(DEPTH)],
    "on the context": lambda: [Scaled() for _ in range(DEPTH)],
    "in place on a kept state": lambda: [Refilling() for _ in range(DEPTH)],
    "tied weights": tied,
    "a skip": lambda: [Skipping(k == DEPTH - 1) for k in range(DEPTH)],
}
TOGETHER = {"tied weights", "a skip", "frozen", "frozen first"}
"""Blocks that differ: a step that is every one of them in turn stands for them in a loop."""


def net_of(kind: str) -> Net:
    torch.manual_seed(7)
    return Net(KINDS[kind](), autocast=kind == "autocast").train()


def looped(net: Net, kind: str) -> tuple[nn.Module, int]:
    """What a `Loop` repeats, and how often, and what plain PyTorch runs beside it."""
    return (net, 4) if kind in TOGETHER else (net.blocks[0], 2 * DEPTH)


def plainly(net: Net, kind: str, frontend: str) -> Call:
    if frontend != "loop":
        return net

    def run(x: torch.Tensor) -> torch.Tensor:
        step, steps = looped(net, kind)
        for _ in range(steps):
            x = step(x)
        return x

    return run


def through(net: Net, kind: str, frontend: str, budget: int, folder: Path) -> Call:
    """The same by one of FRONTENDS within ``budget`` bytes."""
    if frontend == "chain":
        return ts.Chain(list(net.blocks), budget=budget)
    if frontend == "loop":
        step, steps = looped(net, kind)
        run = ts.Loop(step, budget=budget)
        return lambda x: run(x, steps=steps)
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
        )
        return net
    return Program(net, budget=budget, planner="revolve")


def drawn(number: int) -> torch.Tensor:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    return torch.randn(ROWS, WIDTH)


def steps(call: Call, net: Net, *, batches: int = 3) -> dict[str, torch.Tensor | None]:
    """What batches leave behind; the second adds to the gradients of the first, weights change before the third."""
    trace: dict[str, torch.Tensor | None] = {}
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


def tightly(kind: str, frontend: str, folder: Path) -> dict[str, torch.Tensor | None]:
    """What batches leave behind with the least budget that works: that which the errors of smaller ones name."""
    budget = 1
    for attempt in range(6):
        net = net_of(kind)
        call = through(net, kind, frontend, budget, folder / str(attempt))
        try:
            found = steps(call, net)
            ran_again(net, frontend, call)
            return found
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert error.least_nbytes > budget  # noqa: PT017
            budget = error.least_nbytes
        finally:
            if frontend == "stream":
                ts.unstream(net)
    raise AssertionError("no budget named by an error works")


def ran_again(net: Net, frontend: str, call: Call) -> None:
    """The budget was so small that some of it ran twice, or (stream) was moved."""
    if frontend == "chain":
        assert isinstance(call, ts.Chain)
        assert call.plan is not None
        assert call.plan.simulation.forwards > call.plan.simulation.recorded
    elif frontend == "stream":
        found = ts.report(net).plan.simulation
        shared = len({id(p) for b in net.blocks for p in b.parameters()}) < sum(
            len(list(b.parameters())) for b in net.blocks
        )
        assert shared or found.forwards > found.recorded or found.bytes_moved[K, D] > 0
    elif frontend == "program":
        assert isinstance(call, Program)
        assert call.report is not None
        assert call.report.reruns > 0


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_gradients_and_buffers_are_plain_pytorchs(kind: str, frontend: str, tmp_path: Path) -> None:
    theirs = net_of(kind)
    expected = steps(plainly(theirs, kind, frontend), theirs)
    found = tightly(kind, frontend, tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), name
        assert tensor is None or other is None or torch.equal(tensor, other), name


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_second_call_is_not_served_from_the_first(frontend: str, tmp_path: Path) -> None:
    """Two calls at other inputs, then both backwards."""
    kind, room = "dropout", 1 << 20
    theirs, ours = net_of(kind), net_of(kind)
    call = through(ours, kind, frontend, room, tmp_path)

    def both(run: Call, net: Net) -> list[torch.Tensor | None]:
        x, y = drawn(0), drawn(1) * 2
        first, second = run(x), run(y)
        first.square().sum().backward()
        second.square().sum().backward()
        return [first.detach().clone(), second.detach().clone(), *(p.grad for p in net.parameters())]

    try:
        found, expected = both(call, ours), both(plainly(theirs, kind, frontend), theirs)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
    finally:
        if frontend == "stream":
            ts.unstream(ours)


def stepped(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def swapped(p: nn.Parameter) -> None:
    p.data = torch.ones_like(p)


@pytest.mark.parametrize(
    ("frontend", "change"),
    [
        *((frontend, stepped) for frontend in FRONTENDS),
        *((frontend, swapped) for frontend in FRONTENDS),
    ],
)
def test_weights_that_are_others_by_the_time_of_backward_are_refused(
    frontend: str, change: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    kind = "dropout"
    budget = 1
    for attempt in range(6):
        net = net_of(kind)
        call = through(net, kind, frontend, budget, tmp_path / str(attempt))
        try:
            y = call(drawn(0))
            with torch.no_grad():
                change(net.blocks[0].linear.weight)
            with pytest.raises((GradientError, ts.StorageError), match=r"weight|modified|changed|replaced"):
                y.sum().backward()
            return
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
        finally:
            if frontend == "stream":
                ts.unstream(net)
    raise AssertionError("no budget named by an error works")


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_nothing_that_is_saved_stays(frontend: str, dropped: bool, tmp_path: Path) -> None:
    """Neither after a call that is dropped nor while its result is held after backward."""
    kind, net = "dropout", net_of("dropout")
    call = through(net, kind, frontend, 1 << 20, tmp_path)
    results: list[torch.Tensor] = []

    def once(number: int) -> None:
        y = call(drawn(number))
        if not dropped:
            y.sum().backward()
            results.append(y)

    left = []
    try:
        for number in range(3):  # profiles, and plans for what comes again
            once(number)
        gc.collect()
        gc.disable()
        for number in range(3):
            with ts.track_memory() as meter:
                once(number)
                if frontend == "loop":
                    gc.collect()  # what a loop keeps of a call that is dropped goes with cycles
            left.append(meter.end_nbytes)
        state = ROWS * WIDTH * 4
        assert max(left) <= (2 * state if frontend == "chain" else state)  # the result; a chain holds its input with it
    finally:
        gc.enable()
        if frontend == "stream":
            ts.unstream(net)
