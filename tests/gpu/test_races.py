"""Random networks under random plans on a device that is late at random: plain PyTorch's bits, whoever comes first.

Plain PyTorch goes first and is done before ours begins. What ours leaves in host memory is read as soon as it has
returned, without waiting for anything.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenarios import MACHINE, Pairs, Seen, gradients, seen, unequal, weights
from torch import Tensor, nn

import tapestream as ts
from tapestream.errors import BudgetError

WIDTH = 48
Call = Callable[[Tensor], Tensor]


@pytest.fixture
def simulator(request: pytest.FixtureRequest) -> Any:
    """The simulated GPU; None where the GPU is a real one, which is late by itself when it is kept busy."""
    return request.getfixturevalue("simulator") if "simulated_gpu.plugin" in sys.modules else None


# What is drawn


@dataclass(frozen=True)
class Delays:
    """Knobs of the simulated GPU: how late kernels and copies are, and whether fresh memory holds NaN."""

    lag: int
    seed: int
    poison: int
    copy_in: int
    copy_out: int


@dataclass(frozen=True)
class Race:
    """``spare``: the budget beyond the least that works, as a part of it. ``busy``: milliseconds that the device has
    something else to do, before each call."""

    kinds: tuple[str, ...]
    spare: float
    rows: int
    device: str
    busy: int
    delays: Delays

    @contextlib.contextmanager
    def begun(self, simulator: Any) -> Iterator[None]:
        """Inside, the device is late."""
        with simulator.knobs(**asdict(self.delays)) if simulator else contextlib.nullcontext():
            yield

    def keep_busy(self, simulator: Any) -> None:
        """See the class; a real GPU always has."""
        with torch.cuda.device(self.device):
            torch.cuda._sleep(int((self.busy if simulator else max(self.busy, 20)) * 1.5e6))

    def network(self) -> nn.Sequential:
        """On the CPU, with the same bits every time."""
        torch.manual_seed(0)
        first = block("tanh")
        return nn.Sequential(first, *(first if kind == "shared" else block(kind) for kind in self.kinds))

    def batch(self) -> Tensor:
        """The same numbers every time."""
        return torch.randn(self.rows, WIDTH, generator=torch.Generator().manual_seed(5)).to(self.device)


class Residual(nn.Module):
    """Adds what it makes to what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return self.down(torch.nn.functional.gelu(self.up(x))).add_(x)


_LAST: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.3),
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "relu": lambda: nn.ReLU(inplace=True),
    "residual": Residual,
}


def block(kind: str) -> nn.Module:
    """A linear layer and something that saves other things than it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), _LAST[kind]())


DELAYS = st.builds(
    Delays,
    lag=st.sampled_from((0, 30, 120)),
    seed=st.integers(0, 1000),
    poison=st.integers(0, 1),
    copy_in=st.sampled_from((0, 20_000, 80_000)),
    copy_out=st.sampled_from((0, 20_000, 80_000)),
)


def races(least: int, most: int) -> st.SearchStrategy[Race]:
    """Of networks of so many layers after the first."""
    return st.builds(
        Race,
        kinds=st.lists(st.sampled_from((*_LAST, "shared")), min_size=least, max_size=most).map(tuple),
        spare=st.sampled_from((0.0, 0.1, 0.5, 2.0)),
        rows=st.sampled_from((16, 64)),
        device=st.sampled_from(("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cuda:0",)),
        busy=st.sampled_from((0, 10)),
        delays=DELAYS,
    )


def within(race: Race, run: Callable[[int], Seen]) -> Seen:
    """What ``run`` leaves with the least budget that it can do with, and what the race spares."""
    budget, spared = 1, False
    for _ in range(6):
        try:
            return run(budget)
        except BudgetError as error:
            least = error.least_nbytes
            if least is None:
                raise
            budget = least if spared else int(least * (1 + race.spare))
            spared = True
    raise AssertionError(f"{budget} bytes, which were to be enough, were not")


def compared(plain: Seen, ours: Seen) -> Pairs:
    """Beside each other."""
    return list(zip(plain, ours, strict=True))


# Chains and programs: gradients


def differentiated(race: Race, simulator: Any, call: Call, owner: nn.Module, steps: int) -> Seen:
    """Losses, buffers and gradients of some steps of accumulation."""
    x, losses = race.batch().requires_grad_(), []
    torch.manual_seed(3)
    for _ in range(steps):
        race.keep_busy(simulator)
        loss = call(x * 1.0).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*gradients(owner), *seen([x.grad, *losses, *owner.buffers()])]


def run_chain(race: Race, planner: str, simulator: Any) -> Pairs:
    """A chain whose states and tapes may go to host memory."""
    plain = race.network().to(race.device)
    expected = differentiated(race, simulator, plain, plain, 2)

    def run(budget: int) -> Seen:
        owner = race.network().to(race.device)
        chain = ts.Chain(list(owner), budget=budget, planner=planner, home="host", machine=MACHINE)
        return differentiated(race, simulator, chain, owner, 2)

    with race.begun(simulator):
        return compared(expected, within(race, run))


def run_program(race: Race, planner: str, simulator: Any) -> Pairs:
    """A program, recorded and then planned."""
    plain = race.network().to(race.device)
    expected = differentiated(race, simulator, plain, plain, 3)

    def run(budget: int) -> Seen:
        owner = race.network().to(race.device)
        program = ts.Program(lambda x: owner(x), budget=budget, planner=planner, machine=MACHINE)
        return differentiated(race, simulator, program, owner, 3)

    with race.begun(simulator):
        return compared(expected, within(race, run))


# Streamed models: training

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


@dataclass(frozen=True)
class Training:
    """How a streamed model is trained. ``evaluates``: a call without gradients comes between two steps."""

    home: str
    update: str
    optimizer: str
    micro_batches: int
    evaluates: bool


TRAININGS = st.builds(
    Training,
    home=st.sampled_from(("host", "host", "disk")),
    update=st.sampled_from(("step", "backward")),
    optimizer=st.sampled_from(tuple(OPTIMIZERS)),
    micro_batches=st.integers(1, 3),
    evaluates=st.booleans(),
)


def trained(race: Race, how: Training, simulator: Any, model: nn.Module, optimizer: Any) -> Seen:
    """Weights and buffers after three steps, losses and outputs of all; where they exist at all, gradients too."""
    x, found = race.batch(), []
    torch.manual_seed(3)
    left: Seen = []
    for _ in range(3):
        for _ in range(1 if how.update == "backward" else how.micro_batches):
            race.keep_busy(simulator)
            loss = model(x).square().mean()
            loss.backward()
            found.append(loss.detach())
        left += gradients(model) if how.update == "step" else []
        optimizer.step()
        optimizer.zero_grad()
        if how.evaluates:
            with torch.no_grad():
                found.append(model.eval()(x))
            model.train()
    return [*weights(model), *left, *seen([*found, *model.buffers()])]


def run_stream(race: Race, how: Training, simulator: Any) -> Pairs:
    """A streamed model, which is given back at the end."""
    make, knobs = OPTIMIZERS[how.optimizer]
    plain = race.network().to(race.device)
    expected = trained(race, how, simulator, plain, make(plain.parameters(), **knobs))

    def run(budget: int) -> Seen:
        with contextlib.ExitStack() as stack:
            options = {"folder": stack.enter_context(tempfile.TemporaryDirectory())} if how.home == "disk" else {}
            network = race.network()
            model = ts.stream(network, device=race.device, budget=budget, home=how.home, machine=MACHINE, **options)
            stack.callback(ts.unstream, model)
            optimizer = ts.optimizer(model, make, update=how.update, master=None, **knobs)
            return trained(race, how, simulator, model, optimizer)

    with race.begun(simulator):
        return compared(expected, within(race, run))


# The search

MOVING = st.sampled_from(("auto", "offload", "joint"))


def searched(count: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """``count`` examples of what is drawn."""
    late = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    rule, patience = settings(max_examples=count, deadline=None, suppress_health_check=late), pytest.mark.timeout(3600)
    return lambda test: patience(rule(given(**drawn)(test)))


@searched(6, race=races(3, 9), planner=MOVING)
def test_chains(race: Race, planner: str, simulator: Any, one_thread: None) -> None:
    assert unequal(run_chain(race, planner, simulator)) == []


@searched(4, race=races(3, 7), planner=MOVING)
def test_programs(race: Race, planner: str, simulator: Any, one_thread: None) -> None:
    assert unequal(run_program(race, planner, simulator)) == []


@searched(8, race=races(2, 6), how=TRAININGS)
def test_streams(race: Race, how: Training, simulator: Any, one_thread: None) -> None:
    assert unequal(run_stream(race, how, simulator)) == []


@pytest.mark.full
@searched(150, race=races(3, 12), planner=MOVING)
def test_many_chains(race: Race, planner: str, simulator: Any, one_thread: None) -> None:
    assert unequal(run_chain(race, planner, simulator)) == []


@pytest.mark.full
@searched(100, race=races(3, 12), planner=MOVING)
def test_many_programs(race: Race, planner: str, simulator: Any, one_thread: None) -> None:
    assert unequal(run_program(race, planner, simulator)) == []


@pytest.mark.full
@searched(250, race=races(2, 8), how=TRAININGS)
def test_many_streams(race: Race, how: Training, simulator: Any, one_thread: None) -> None:
    assert unequal(run_stream(race, how, simulator)) == []
