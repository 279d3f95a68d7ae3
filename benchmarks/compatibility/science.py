"""Packages for spiking neurons and for differential equations, unmodified: those of them that are installed."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.compatibility.called import CallCase, CallSubject

PACKAGES = ("snntorch", "spikingjelly", "norse", "torchsde", "torchdiffeq")
_STEPS, _BATCH, _WIDTH, _CLASSES = 20, 4, 16, 5
Step = Callable[[Any, torch.Tensor], Any]


def cases() -> Iterator[CallCase]:
    """What takes steps goes both ways; a solver is a program."""
    both: tuple[Literal["Loop", "Program"], ...] = ("Loop", "Program")
    if _found("snntorch"):
        for name, make in _snntorch().items():
            yield from (CallCase(f"snntorch {name}", way, make) for way in both)
    if _found("spikingjelly"):
        for kind in ("IFNode", "LIFNode", "ParametricLIFNode"):
            yield from (CallCase(f"spikingjelly {kind}, step by step", way, _jelly(kind)) for way in both)
        yield CallCase("spikingjelly LIFNode, all steps in a call", "Program", _jelly("LIFNode", many=True))
    if _found("norse"):
        yield from (CallCase("norse LIFCell", way, _norse) for way in both)
    if _found("torchsde"):
        for method, kind in (("euler", "ito"), ("midpoint", "stratonovich"), ("milstein", "ito"), ("srk", "ito")):
            for adjoint in (False, True)[: 1 + (method == "midpoint")]:
                name = f"torchsde {'sdeint_adjoint' if adjoint else 'sdeint'}, {method}"
                yield CallCase(name, "Program", _stochastic(method, kind, adjoint), searched=method != "srk")
    if _found("torchdiffeq"):
        for method in ("rk4", "dopri5"):
            yield CallCase(f"torchdiffeq odeint, {method}", "Program", _ordinary(method))
        yield CallCase("torchdiffeq odeint_adjoint, dopri5", "Program", _ordinary("dopri5", adjoint=True))


def _found(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _stepped(module: nn.Module, step: Step, begin: Callable[[], Any], shape: tuple[int, ...] = (10,)) -> CallSubject:
    def whole(inputs: torch.Tensor) -> Any:
        state, outs = begin(), []
        for x in inputs:
            state, out = step(state, x)
            outs.append(out)
        return state, torch.stack(outs)

    inputs = torch.rand((_STEPS, _BATCH, *shape), generator=torch.Generator().manual_seed(3)) * 3
    return CallSubject(module, inputs, whole, step, begin)


def _snntorch() -> dict[str, Callable[[], CallSubject]]:
    import snntorch

    leaky, synaptic, recurrent = snntorch.Leaky, snntorch.Synaptic, snntorch.RLeaky
    return {
        "Leaky": lambda: _explicit(lambda _: leaky(beta=0.9), 1),
        "Leaky, learned": lambda: _explicit(lambda _: leaky(beta=0.9, learn_beta=True, learn_threshold=True), 1),
        "Leaky, reset to zero": lambda: _explicit(lambda _: leaky(beta=0.9, reset_mechanism="zero"), 1),
        "Synaptic": lambda: _explicit(lambda _: synaptic(alpha=0.8, beta=0.9, learn_alpha=True), 2),
        "Leaky, init_hidden": lambda: _hidden(lambda _: leaky(beta=0.9, init_hidden=True)),
        "Synaptic, init_hidden": lambda: _hidden(lambda _: synaptic(alpha=0.8, beta=0.9, init_hidden=True)),
        "RLeaky, init_hidden": lambda: _hidden(lambda n: recurrent(beta=0.9, init_hidden=True, linear_features=n)),
        "convolutions, BatchNorm, Leaky with init_hidden": _convolutions,
    }


def _explicit(cell: Callable[[int], nn.Module], many: int) -> CallSubject:
    net = nn.ModuleList([nn.Linear(10, _WIDTH), cell(_WIDTH), nn.Linear(_WIDTH, _CLASSES), cell(_CLASSES)])

    def step(state: Any, x: torch.Tensor) -> Any:
        spikes, *first = net[1](net[0](x), *state[0])
        spikes, *second = net[3](net[2](spikes), *state[1])
        return (tuple(first), tuple(second)), spikes

    def begin() -> Any:
        return tuple(tuple(torch.zeros(_BATCH, width) for _ in range(many)) for width in (_WIDTH, _CLASSES))

    return _stepped(net, step, begin)


def _hidden(cell: Callable[[int], nn.Module]) -> CallSubject:
    from snntorch._neurons.neurons import SpikingNeuron

    SpikingNeuron.init()  # forgets the networks of earlier rows, which `utils.reset` would clear, too
    return _cleared(nn.Sequential(nn.Linear(10, _WIDTH), cell(_WIDTH), nn.Linear(_WIDTH, _CLASSES), cell(_CLASSES)))


def _convolutions() -> CallSubject:
    import snntorch
    from snntorch._neurons.neurons import SpikingNeuron

    SpikingNeuron.init()
    return _cleared(nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), snntorch.Leaky(beta=0.5, init_hidden=True), nn.Conv2d(6, 8, 3),
        nn.BatchNorm2d(8), nn.MaxPool2d(2), snntorch.Leaky(beta=0.5, init_hidden=True), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(32, _CLASSES), snntorch.Leaky(beta=0.5, init_hidden=True),
    ), (1, 16, 16))  # fmt: skip


def _cleared(net: nn.Module, shape: tuple[int, ...] = (10,)) -> CallSubject:
    from snntorch import utils

    def begin() -> torch.Tensor:
        utils.reset(net)
        return torch.zeros(_BATCH, _CLASSES)

    return _stepped(net, _summing(net), begin, shape)


def _summing(net: nn.Module) -> Step:
    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        spikes = net(x)
        return total + spikes, spikes

    return step


def _jelly(kind: str, many: bool = False) -> Callable[[], CallSubject]:
    def make() -> CallSubject:
        from spikingjelly.activation_based import functional, layer, neuron

        one, two = (getattr(neuron, kind)() for _ in range(2))
        net = nn.Sequential(layer.Linear(10, _WIDTH), one, layer.Linear(_WIDTH, _CLASSES), two)
        functional.set_step_mode(net, "m" if many else "s")

        def begin() -> torch.Tensor:
            functional.reset_net(net)
            return torch.zeros(_BATCH, _CLASSES)

        def whole(inputs: torch.Tensor) -> torch.Tensor:
            functional.reset_net(net)
            found: torch.Tensor = net(inputs)
            return found

        written = _stepped(net, _summing(net), begin)
        return CallSubject(net, written.inputs, whole) if many else written

    return make


def _norse() -> CallSubject:
    import norse.torch

    net = norse.torch.SequentialState(
        nn.Linear(10, _WIDTH), norse.torch.LIFCell(), nn.Linear(_WIDTH, _CLASSES), norse.torch.LICell()
    )

    def step(state: Any, x: torch.Tensor) -> Any:
        out, state = net(x, state)
        return state, out

    def begin() -> Any:
        with torch.no_grad():
            return net(torch.zeros(_BATCH, 10), None)[1]

    return _stepped(net, step, begin)


class SmallSde(nn.Module):
    """With diagonal noise."""

    noise_type = "diagonal"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.sde_type = kind
        self.drift = nn.Sequential(nn.Linear(3, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 3))
        self.diffusion = nn.Linear(3, 3)

    def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The drift."""
        found: torch.Tensor = self.drift(y)
        return found

    def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The diffusion."""
        return torch.sigmoid(self.diffusion(y))


def _stochastic(method: str, kind: str, adjoint: bool) -> Callable[[], CallSubject]:
    """NumPy's generator gives the seed of the Brownian motion."""

    def make() -> CallSubject:
        import torchsde

        net, solve = SmallSde(kind), torchsde.sdeint_adjoint if adjoint else torchsde.sdeint
        times = torch.linspace(0, 1, 5)
        return CallSubject(net, torch.full((64, 3), 0.1), lambda start: solve(net, start, times, dt=0.1, method=method))

    return make


class SmallField(nn.Module):
    """Of an ordinary differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 3))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Its value at a time."""
        found: torch.Tensor = self.net(y) * torch.cos(t)
        return found


def _ordinary(method: str, adjoint: bool = False) -> Callable[[], CallSubject]:
    def make() -> CallSubject:
        import torchdiffeq

        net, solve = SmallField(), torchdiffeq.odeint_adjoint if adjoint else torchdiffeq.odeint
        options: dict[str, Any] = {"options": {"step_size": 0.1}} if method == "rk4" else {"rtol": 1e-4, "atol": 1e-5}
        times = torch.linspace(0, 1, 5)
        return CallSubject(
            net, torch.full((64, 3), 0.1), lambda start: solve(net, start, times, method=method, **options)
        )

    return make
