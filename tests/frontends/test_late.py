"""What a stage does in a later call though not in the one that was profiled: as in plain PyTorch, or refused by name
once and right from then on."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError

LATER = [False]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if LATER[0]:
            y = self.later(y)
        return torch.tanh(y - self.mean) * (1 + 0.1 * self.count)

    def later(self, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class WritesItsBuffer(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


class ReplacesItsBuffer(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y


class Counts(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return y


class DrawsFromPython(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        return y * random.random()


class DrawsFromNumPy(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        return y * float(numpy.random.rand())


class DrawsFromTorch(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(y, 0.3)


class ChangesItsWeight(Block):
    def later(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return y * 1.0


class Net(nn.Module):
    def __init__(self, block: Callable[[], Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def chained(net: Net) -> Callable[[torch.Tensor], torch.Tensor]:
    return ts.Chain(list(net.blocks), budget="70KiB", planner="revolve")


def streamed(net: Net) -> Callable[[torch.Tensor], torch.Tensor]:
    model: Any = ts.stream(net, device="cpu", home="device", budget="150KiB", planner="revolve")
    return model


def step(net: Net, run: Callable[[torch.Tensor], torch.Tensor], number: int) -> list[Any]:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    LATER[0] = number > 0
    for parameter in net.parameters():
        parameter.grad = None
    x = torch.randn(64, 32)
    loss = run(x).square().sum()
    loss.backward()
    values = [loss.detach(), *(p.grad for p in net.parameters()), *net.buffers(), torch.get_rng_state()]
    kept = [value.clone() for value in values if value is not None]
    return [*kept, *(block.count for block in net.blocks), random.random(), numpy.random.rand()]


def same(a: list[Any], b: list[Any]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


AT_ONCE = (ReplacesItsBuffer, Counts, DrawsFromTorch)
FROM_THE_NEXT_CALL_ON = (WritesItsBuffer, DrawsFromPython, DrawsFromNumPy)


@pytest.mark.parametrize("make", [chained, streamed])
@pytest.mark.parametrize("block", AT_ONCE)
def test_right_at_once(block: Callable[[], Block], make: Callable[[Net], Any]) -> None:
    theirs, ours = Net(block), Net(block)
    run = make(ours)
    for number in range(4):
        assert same(step(theirs, theirs, number), step(ours, run, number))


@pytest.mark.parametrize("make", [chained, streamed])
@pytest.mark.parametrize("block", FROM_THE_NEXT_CALL_ON)
def test_refused_by_name_and_then_right(block: Callable[[], Block], make: Callable[[Net], Any]) -> None:
    ours = Net(block)
    run = make(ours)
    step(ours, run, 0)
    before = {name: buffer.clone() for name, buffer in ours.named_buffers()}
    with pytest.raises(GradientError, match=r"not do when it was profiled.*run the step again"):
        step(ours, run, 1)
    for name, buffer in ours.named_buffers():
        buffer.copy_(before[name])
    step(ours, run, 1)
    theirs = Net(block)
    step(theirs, theirs, 0)
    step(theirs, theirs, 1)
    for number in range(2, 5):
        assert same(step(theirs, theirs, number), step(ours, run, number))


def test_a_stage_that_changes_its_own_weights_later_is_refused() -> None:
    net = Net(ChangesItsWeight)
    run = chained(net)
    step(net, run, 0)
    with pytest.raises(GradientError, match="changed one of its own parameters"):
        step(net, run, 1)
