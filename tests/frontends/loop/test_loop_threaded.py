"""Steps that keep their state in attributes and buffers of modules, as spiking neurons do, against a plain loop."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.storage.meter import track_memory

BATCH, WIDTH, STEPS = 3, 5, 40


class InBuffer(nn.Module):
    """A leaky neuron; its potential is a buffer that has no elements before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.register_buffer("potential", torch.zeros(0), persistent=False)
        self.fired: torch.Tensor | None = None

    def clear(self) -> None:
        self.potential = torch.zeros_like(self.potential)

    def forward(self, x: torch.Tensor, potential: torch.Tensor | None = None) -> torch.Tensor:
        if potential is not None:
            self.potential = potential
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = self.decay * self.potential + x
        self.fired = (self.potential > 1).float().detach()
        self.potential = self.potential - self.fired
        return torch.sigmoid(self.potential)


class InDictionary(nn.Module):
    """The same in a dictionary that is an attribute, where a number stands before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.kept: dict[str, Any] = {"potential": 0.0}

    def clear(self) -> None:
        self.kept["potential"] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["potential"] = self.decay * self.kept["potential"] + x
        return torch.sigmoid(self.kept["potential"])


class InAttribute(nn.Module):
    """The same in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.9))
        self.clear()

    def clear(self) -> None:
        self.potential = torch.zeros(BATCH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.potential = self.decay * self.potential + x
        return torch.sigmoid(self.potential)


class Network(nn.Module):
    """Two layers; random numbers and running statistics are in the first."""

    def __init__(self, neuron: type[nn.Module]) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))
        self.layers = nn.Sequential(first, neuron(), nn.Linear(WIDTH, WIDTH), neuron())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found

    def neurons(self) -> list[Any]:
        return [self.layers[1], self.layers[3]]


def trained(neuron: type[nn.Module], budget: str | None, *, stack: bool, clears: bool = True) -> list[torch.Tensor]:
    """All that three steps leave: losses, gradients, parameters, buffers, random numbers."""
    torch.manual_seed(0)
    network, rows, left = Network(neuron), torch.rand(STEPS, BATCH, WIDTH) * 2, []

    def step(total: torch.Tensor, x: torch.Tensor) -> Any:
        out = network(x)
        return (total + out, out.square()) if stack else total + out

    loop = None if budget is None else ts.Loop(step, budget=budget)
    for _ in range(3):
        if clears:
            for one in network.neurons():
                one.clear()
        else:
            for one in network.neurons():
                one.potential = one.potential.detach()
        total, outs = torch.zeros(BATCH, WIDTH), []
        if loop is None:
            for x in rows:
                found = step(total, x)
                total, out = found if stack else (found, None)
                outs.append(out)
            stacked = torch.stack(outs) if stack else None
        elif stack:
            total, stacked = loop(total, inputs=rows, outputs="stack")
        else:
            total, stacked = loop(total, inputs=rows), None
        loss = total.square().mean() if stacked is None else total.square().mean() + stacked.mean()
        for one in network.neurons():
            kept = one.kept["potential"] if isinstance(one, InDictionary) else one.potential
            loss = loss + kept.mean()  # what the last step leaves has its gradient, too
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
        with torch.no_grad():
            for p in network.parameters():
                p -= 1e-6 * p.grad
                p.grad = None
    return [*left, *network.parameters(), *network.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("neuron", [InBuffer, InDictionary, InAttribute])
@pytest.mark.parametrize("budget", ["1GiB", "48KiB"])
def test_what_a_step_keeps_is_a_part_of_the_state(neuron: type[nn.Module], stack: bool, budget: str) -> None:
    wanted, found = (trained(neuron, one, stack=stack) for one in (None, budget))
    assert len(wanted) == len(found)
    assert all(map(torch.equal, wanted, found))


def test_a_state_that_goes_on_from_call_to_call() -> None:
    wanted, found = (trained(InAttribute, one, stack=False, clears=False) for one in (None, "48KiB"))
    assert all(map(torch.equal, wanted, found))


def test_a_buffer_that_becomes_the_state_is_no_change_of_the_step() -> None:
    """Also in the second call, which finds in the buffer what the first has left."""
    torch.manual_seed(0)
    neuron, rows = InBuffer(), torch.rand(STEPS, BATCH, WIDTH)

    def step(potential: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = neuron(x, potential)
        return neuron.potential, out

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (found,) = torch.autograd.grad(run(torch.zeros(BATCH, WIDTH)).square().sum(), neuron.decay)
        return found

    def plainly(state: torch.Tensor) -> torch.Tensor:
        outs = []
        for x in rows:
            state, out = step(state, x)
            outs.append(out)
        return torch.stack(outs)

    loop = ts.Loop(step, budget="10KiB")
    wanted = gradient(plainly)
    for _ in range(3):
        assert torch.equal(gradient(lambda state: loop(state, inputs=rows, outputs="stack")[1]), wanted)


@pytest.mark.parametrize("how", ["sum", "until", "grows"])
def test_what_cannot_be_threaded_is_refused_by_name(how: str) -> None:
    neuron, seen = InAttribute(), list[torch.Tensor]()

    def step(state: torch.Tensor, x: torch.Tensor | None = None) -> Any:
        out = state + neuron(torch.ones(BATCH, WIDTH) if x is None else x)
        if how == "grows":
            seen.append(out)
            out = out + len(seen)
        return (out, out) if how == "sum" else out

    options = {"sum": {"steps": 4, "outputs": "sum"}, "until": {"until": lambda s: s.sum() > 40, "max_steps": 9},
               "grows": {"steps": 4}}[how]  # fmt: skip
    before = neuron.potential
    with pytest.raises(ts.errors.InputError, match=r"InAttribute\.potential|step\.seen"):
        ts.Loop(step, budget="1MiB")(torch.zeros(BATCH, WIDTH), **options)
    assert torch.equal(neuron.potential, before)
    assert not seen


class Wide(nn.Module):
    """Keeps a wide state, and saves several of it in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.full((64,), 0.9))
        self.potential = torch.zeros(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.potential = torch.tanh(torch.sin(self.decay * self.potential) + x)
        return self.potential


def test_the_first_steps_tape_is_in_the_budget() -> None:
    neuron, state = Wide(), 4 * 512 * 64

    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total + neuron(x)

    loop, x = ts.Loop(step, budget=16 * state), torch.ones(40, 64)
    for measured in (False, True, True):
        neuron.potential = torch.zeros(512, 64)
        with track_memory() if measured else nullcontext() as meter:
            loop(torch.zeros(512, 64), inputs=x).sum().backward()
        # Beside the budget: the first states, the results, and what the loss makes.
        assert meter is None or meter.peak_nbytes <= 1.02 * 16 * state + 6 * state
    with pytest.raises(BudgetError):
        ts.Loop(step, budget=2 * state)(torch.zeros(512, 64), inputs=x)


def test_what_the_first_step_saved_is_written_into() -> None:
    neuron = Wide()

    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return total * neuron(x)

    def run(step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], plain: bool) -> None:
        neuron.potential, first = torch.zeros(512, 64), torch.ones(512, 64)
        total, x = first, torch.ones(4, 64)
        if plain:
            for row in x:
                total = step(total, row)
        else:
            total = ts.Loop(step, budget="64MiB")(total, inputs=x)
        first.mul_(2)  # the first product's backward needs it
        total.sum().backward()

    for plain in (True, False):
        with pytest.raises(RuntimeError, match=r"modified by an inplace\s+operation"):
            run(step, plain)


def test_a_refusal_leaves_generators_as_they_were() -> None:
    neuron, seen = InAttribute(), list[torch.Tensor]()

    def step(state: torch.Tensor) -> torch.Tensor:
        seen.append(neuron(torch.rand(BATCH, WIDTH)))
        return state + seen[-1] * len(seen)

    before = torch.get_rng_state()
    with pytest.raises(ts.errors.InputError):
        ts.Loop(step, budget="1MiB")(torch.zeros(BATCH, WIDTH), 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seen


class Sometimes(nn.Module):
    """Keeps state, or not, with running statistics and random numbers besides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.neuron, self.keeps = (
            nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)),
            InAttribute(),
            True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return self.neuron(found) if self.keeps else found * self.neuron.decay


def test_a_step_that_keeps_state_in_some_calls_runs_each_step_once() -> None:
    def left(looped: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, x, found = Sometimes(), torch.rand(BATCH, WIDTH), list[torch.Tensor]()
        loop = ts.Loop(net, budget="1MiB")
        for keeps in (True, False, True, False):
            net.keeps = keeps
            net.neuron.clear()
            state = x
            if looped:
                state = loop(state, 6)
            else:
                for _ in range(6):
                    state = net(state)
            found += [state.detach(), *torch.autograd.grad(state.square().sum(), net.neuron.decay)]
        return [*found, *net.buffers(), torch.get_rng_state()]

    assert all(map(torch.equal, left(True), left(False)))


def test_a_budget_that_is_too_small_leaves_all_as_it_was() -> None:
    torch.manual_seed(0)
    net, x = Sometimes(), torch.rand(BATCH, WIDTH)
    before = [net.neuron.potential.clone(), *(b.clone() for b in net.buffers()), torch.get_rng_state()]
    with pytest.raises(BudgetError):
        ts.Loop(net, budget=200)(x, 30)
    assert all(map(torch.equal, before, [net.neuron.potential, *net.buffers(), torch.get_rng_state()]))
