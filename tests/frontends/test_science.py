"""Packages of other fields, unmodified, through `ts.Loop` and `ts.Program`: snnTorch, torchsde, torchdiffeq. Each is
trained beside plain PyTorch: losses, gradients, parameters, buffers and generators are the same, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import snntorch
import torch
import torchdiffeq
import torchsde
from snntorch import surrogate, utils
from snntorch._neurons.neurons import SpikingNeuron
from torch import nn
from torch.utils import _pytree as pytree

import tapestream as ts
from tapestream.errors import BudgetError

STEPS, BATCH, WIDTH, CLASSES = 10, 4, 8, 5
Run = Callable[..., Any]


@dataclass
class Neurons:
    """``step`` takes a state and an input; ``begin`` makes the first state, and clears what modules keep."""

    module: nn.Module
    step: Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]
    begin: Callable[[], Any]
    shape: tuple[int, ...] = (10,)
    inputs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.rand((STEPS, BATCH, *self.shape), generator=generator) * 3

    def whole(self, inputs: torch.Tensor) -> Any:
        """All steps, as a user writes them."""
        state, outs = self.begin(), []
        for x in inputs:
            state, out = self.step(state, x)
            outs.append(out)
        return state, torch.stack(outs)


def explicit(cell: type[nn.Module], many: int, **options: Any) -> Neurons:
    """Two layers whose ``many`` states go in and come out."""
    net = nn.ModuleDict({
        "in": nn.Linear(10, WIDTH), "first": cell(**options),
        "out": nn.Linear(WIDTH, CLASSES), "second": cell(**options),
    })  # fmt: skip

    def step(state: Any, x: torch.Tensor) -> Any:
        spikes, *one = net["first"](net["in"](x), *state[0])
        spikes, *two = net["second"](net["out"](spikes), *state[1])
        return (tuple(one), tuple(two)), spikes

    def begin() -> Any:
        return tuple(tuple(torch.zeros(BATCH, width) for _ in range(many)) for width in (WIDTH, CLASSES))

    return Neurons(net, step, begin)


def recurrent() -> Neurons:
    net = nn.ModuleDict({
        "in": nn.Linear(10, WIDTH), "cell": snntorch.RLeaky(beta=0.9, linear_features=WIDTH),
        "out": nn.Linear(WIDTH, CLASSES),
    })  # fmt: skip

    def step(state: Any, x: torch.Tensor) -> Any:
        spikes, potential = net["cell"](net["in"](x), *state)
        return (spikes, potential), net["out"](spikes)

    return Neurons(net, step, lambda: (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))


def hidden(cell: Callable[..., nn.Module]) -> Neurons:
    """Cells that keep their states; the loop's own state is the sum of all spikes."""
    net = nn.Sequential(nn.Linear(10, WIDTH), cell(WIDTH), nn.Linear(WIDTH, CLASSES), cell(CLASSES))

    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        spikes = net(x)
        return total + spikes, spikes

    def begin() -> torch.Tensor:
        utils.reset(net)
        return torch.zeros(BATCH, CLASSES)

    return Neurons(net, step, begin)


def convolutions(keeps: bool) -> Neurons:
    """With batch normalisation and dropout; the cells keep their states or take them."""
    leaky = {"beta": 0.5, "spike_grad": surrogate.fast_sigmoid(slope=25), "init_hidden": keeps}
    first = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2))
    one, two = snntorch.Leaky(**leaky), snntorch.Leaky(**leaky)
    last = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(27, CLASSES))
    net = nn.ModuleList([first, one, last, two])

    def step(state: Any, x: torch.Tensor) -> Any:
        if keeps:
            spikes = two(last(one(first(x))))
            return state + spikes, spikes
        spikes, a = one(first(x), state[0])
        spikes, b = two(last(spikes), state[1])
        return (a, b), spikes

    def begin() -> Any:
        if keeps:
            utils.reset(net)
            return torch.zeros(BATCH, CLASSES)
        return torch.zeros(BATCH, 3, 3, 3), torch.zeros(BATCH, CLASSES)

    return Neurons(net, step, begin, shape=(1, 8, 8))


Leaky, Synaptic, RLeaky = snntorch.Leaky, snntorch.Synaptic, snntorch.RLeaky
NEURONS: dict[str, Callable[[], Neurons]] = {
    "Leaky, subtract": lambda: explicit(Leaky, 1, beta=0.9, reset_mechanism="subtract"),
    "Leaky, zero": lambda: explicit(Leaky, 1, beta=0.9, reset_mechanism="zero"),
    "Leaky, none": lambda: explicit(Leaky, 1, beta=0.9, reset_mechanism="none"),
    "Leaky, learned": lambda: explicit(Leaky, 1, beta=0.9, learn_beta=True, learn_threshold=True),
    "Synaptic": lambda: explicit(Synaptic, 2, alpha=0.8, beta=0.9, learn_alpha=True),
    "RLeaky": recurrent,
    "Leaky, hidden": lambda: hidden(lambda _: Leaky(beta=0.9, init_hidden=True, learn_beta=True)),
    "Synaptic, hidden": lambda: hidden(lambda _: Synaptic(alpha=0.8, beta=0.9, init_hidden=True)),
    "RLeaky, hidden": lambda: hidden(lambda width: RLeaky(beta=0.9, init_hidden=True, linear_features=width)),
    "convolutions": lambda: convolutions(keeps=False),
    "convolutions, hidden": lambda: convolutions(keeps=True),
}


def trained(module: nn.Module, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What three steps leave, by name."""
    torch.manual_seed(1)
    numpy.random.seed(1)
    optimizer, left = torch.optim.SGD(module.parameters(), lr=0.05), dict[str, torch.Tensor]()
    for k in range(3):
        value = loss()
        value.backward()
        left[f"{k} loss"] = value.detach()
        left |= {f"{k} gradient {name}": p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        left |= {f"{k} after {name}": p.detach().clone() for name, p in module.named_parameters()}
        left |= {f"{k} buffer {name}": b.detach().clone() for name, b in module.named_buffers()}
    return left | {"torch": torch.get_rng_state(), "NumPy": torch.from_numpy(numpy.random.get_state()[1].copy())}


def assert_same(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert any("gradient" in name and value.any() for name, value in wanted.items())
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert value.dtype == found[name].dtype, name
        assert torch.equal(value, found[name]), name


def of_neurons(kind: str, way: str, budget: int | str | None) -> tuple[dict[str, torch.Tensor], Any]:
    """Trained by plain PyTorch (budget None) or through a `ts.Loop` or `ts.Program`, which is given, too."""
    torch.manual_seed(0)
    SpikingNeuron.init()  # else `utils.reset` would clear those of earlier networks, too
    made, run = NEURONS[kind](), None
    if budget is not None:
        run = ts.Loop(made.step, budget=budget) if way == "Loop" else program(made.whole, budget)

    def loss() -> torch.Tensor:
        if run is None:
            state, outs = made.whole(made.inputs)
        elif way == "Loop":
            state, outs = run(made.begin(), inputs=made.inputs, outputs="stack")
        else:
            state, outs = run(made.inputs)
        last = pytree.tree_leaves(state)[-1]
        return outs.mean((0, 1)).sin().sum() + last.square().mean()

    return trained(made.module, loss), run


def program(function: Run, budget: int | str) -> ts.Program:
    """Of "auto", the search for a plan takes most of the time of runs as short as these."""
    return ts.Program(function, budget=budget, planner="revolve")


def least(make: Callable[[int], Any]) -> int:
    """What the error of a call with a budget of a byte names."""
    with pytest.raises(BudgetError) as caught:
        make(1)
    assert caught.value.least_nbytes is not None
    return caught.value.least_nbytes


@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("room", ["ample", "tight"])
def test_spiking_neurons_of_snntorch_in_a_loop(kind: str, room: str) -> None:
    budget = "1GiB" if room == "ample" else 2 * least(lambda budget: of_neurons(kind, "Loop", budget))
    (wanted, _), (found, loop) = of_neurons(kind, "Loop", None), of_neurons(kind, "Loop", budget)
    assert_same(wanted, found)
    assert (loop.plan.simulation.forwards > loop.plan.schedule.stages) == (room == "tight")


@pytest.mark.parametrize("kind", NEURONS)
@pytest.mark.parametrize("room", ["ample", "tight"])
def test_spiking_neurons_of_snntorch_in_a_program(kind: str, room: str) -> None:
    """Tight: less than twice the least."""
    tight = "60KiB" if kind.startswith("convolutions") else "6KiB"
    wanted, _ = of_neurons(kind, "Program", None)
    found, run = of_neurons(kind, "Program", "1GiB" if room == "ample" else tight)
    assert_same(wanted, found)
    assert room == "ample" or run.report.reruns > 0


class NoisyEquation(nn.Module):
    """A stochastic differential equation with diagonal noise."""

    noise_type = "diagonal"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.sde_type = kind
        self.drift = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.diffusion = nn.Linear(3, 3)

    def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.drift(y)
        return found

    def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.diffusion(y))


def stochastic(method: str, entropy: int | None, solver: Run = torchsde.sdeint) -> tuple[nn.Module, Run]:
    """``entropy``: of a Brownian motion made inside; None: torchsde makes its own, whose seed NumPy draws."""
    net = NoisyEquation("stratonovich" if method == "midpoint" else "ito")
    area = "space-time" if method == "srk" else "none"

    def solve(start: torch.Tensor) -> Any:
        motion = None
        if entropy is not None:
            motion = torchsde.BrownianInterval(
                t0=0.0, t1=0.5, size=start.shape, entropy=entropy, levy_area_approximation=area
            )
        return solver(net, start, torch.linspace(0, 0.5, 3), bm=motion, dt=0.1, method=method)

    return net, solve


class SmoothEquation(nn.Module):
    """Of an ordinary differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(y) * torch.cos(t)
        return found


def ordinary(method: str) -> tuple[nn.Module, Run]:
    net = SmoothEquation()
    options = {"rtol": 1e-3, "atol": 1e-4} if method in ("dopri5", "bosh3") else {"options": {"step_size": 0.1}}
    return net, lambda start: torchdiffeq.odeint(net, start, torch.linspace(0, 1, 3), method=method, **options)


EQUATIONS: dict[str, Callable[[], tuple[nn.Module, Run]]] = {
    "euler, NumPy's seed": lambda: stochastic("euler", None),
    "euler, entropy": lambda: stochastic("euler", 7),
    "midpoint, NumPy's seed": lambda: stochastic("midpoint", None),
    "midpoint, adjoint": lambda: stochastic("midpoint", None, torchsde.sdeint_adjoint),
    "srk, entropy": lambda: stochastic("srk", 7),
    "rk4": lambda: ordinary("rk4"),
    "dopri5": lambda: ordinary("dopri5"),
}
TIGHT = {
    "euler, NumPy's seed": "310KiB", "euler, entropy": "310KiB", "midpoint, NumPy's seed": "310KiB", "rk4": "310KiB",
    "dopri5": "310KiB", "midpoint, adjoint": "120KiB",
}  # fmt: skip
"""Two thirds of it are the states of generators that torchsde makes, one for each draw. With srk it takes seconds."""


def of_equation(kind: str, budget: int | str | None) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    module, solve = EQUATIONS[kind]()
    run = solve if budget is None else program(solve, budget)
    return trained(module, lambda: run(torch.full((256, 3), 0.1)).square().mean()), run


@pytest.mark.parametrize(("kind", "budget"), [*((kind, "1GiB") for kind in EQUATIONS), *TIGHT.items()])
def test_solvers_of_torchsde_and_torchdiffeq(kind: str, budget: str) -> None:
    wanted, _ = of_equation(kind, None)
    found, run = of_equation(kind, budget)
    assert_same(wanted, found)
    assert budget == "1GiB" or run.report.reruns > 0
