"""Claim: a plan is a promise. What a step takes at its peak is what its plan says, and never more than the budget.

Models and budgets are drawn: chains, streamed models with AdamW, loops and programs of uneven layers, each at a budget
anywhere between the least that works and all. One step is measured once plans have settled. What the plan counts is
what is measured: of a chain, loop or program all beyond arguments, parameters and result (a loss, and the gradient that
backward begins with); of a streamed model all of it.
"""

import gc
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tapestream as ts
from benchmarks.common import Row, Run, Settings, peak_nbytes, save, settings, streamed_peak_nbytes, yes

TITLE = "Peaks of drawn models at drawn budgets: planned and measured"
DRAWN = 300
MEDIAN, WORST = 0.005, 0.02
RESULT = 8
"""Bytes of a loss, and of the gradient that backward begins with."""
SETTLED = 4
"""Steps that are not measured: a program's first calls look for better plans for those after them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model at a budget: one ``step`` of it, what that takes at its ``peak`` in bytes, and the ``plan`` once steps
    have run."""

    step: Run
    peak: Callable[[], int]
    plan: Callable[[], ts.Plan]


class Residual(nn.Module):
    """A norm and two products, added to what comes in."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        added: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return added


class Gated(nn.Module):
    """A product times the sigmoid of another."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(width, to), nn.Linear(width, to)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to (rows, to)."""
        return self.value(x) * torch.sigmoid(self.gate(x))


class Mixed(nn.Module):
    """Rows attend to rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        q, k, v = (part.view(1, -1, 4, part.shape[-1] // 4).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        added: Tensor = x + self.out(mixed)
        return added


class Mean(nn.Module):
    """A loss."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to one number."""
        return x.square().mean()


def layers(draw: random.Random, count: int, width: int, *, even: bool) -> list[nn.Module]:
    """Drawn layers, one after the other; where not ``even`` their widths differ."""
    found: list[nn.Module] = []
    for _ in range(count):
        to = width if even else draw.choice((64, 128, 256))
        kind = draw.randrange(5)
        if to != width or kind == 0:
            found.append(Gated(width, to))
        elif kind == 1:
            found.append(Mixed(width))
        elif kind == 2:
            found.append(nn.Sequential(nn.Linear(width, to), draw.choice((nn.ReLU, nn.Tanh, nn.SiLU))()))
        else:
            found.append(Residual(width, draw.choice((width, 4 * width)), draw.choice((0.0, 0.1))))
        width = to
    return found


class Stack(nn.Module):
    """Blocks between two layers of other widths."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(32, width), nn.ModuleList(blocks), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 32) to one number."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def between(draw: random.Random, made: Callable[[int | None], Drawn]) -> tuple[Drawn, int]:
    """What is drawn at a budget between the least and all, and the budget."""
    ample = made(None)
    for _ in range(2):
        ample.step()
    everything = ample.plan().peak_nbytes
    least = everything
    try:
        made(1).step()
    except ts.BudgetError as error:
        least = error.least_nbytes or everything
    budget = round(least + draw.random() * max(0, everything - least))
    return made(budget), budget


def chain(draw: random.Random) -> tuple[Drawn, int]:
    """Stages of a `ts.Chain`."""
    width, rows = draw.choice((64, 128, 256)), draw.choice((128, 256, 512))
    stages, x = [*layers(draw, draw.randint(3, 14), width, even=False), Mean()], torch.randn(rows, width)

    def made(budget: int | None) -> Drawn:
        return of_call(ts.Chain(stages, budget=budget, gradients_within=True), (x,), stages)

    return between(draw, made)


def program(draw: random.Random) -> tuple[Drawn, int]:
    """A function that calls layers, some of them twice, and adds what two of them give."""
    width, rows = draw.choice((64, 128)), draw.choice((128, 256, 512))
    found, x = layers(draw, draw.randint(3, 10), width, even=True), torch.randn(rows, width)
    skips = [draw.random() < 0.3 for _ in found]

    def function(x: Tensor) -> Tensor:
        for layer, skip in zip(found, skips, strict=True):
            x = x + torch.tanh(layer(layer(x))) if skip else layer(x)
        return x.square().mean()

    def made(budget: int | None) -> Drawn:
        return of_call(ts.Program(function, budget=budget, gradients_within=True), (x,), found)

    return between(draw, made)


def of_call(net: Any, inputs: tuple[Any, ...], modules: list[nn.Module]) -> Drawn:
    """A handle that is called and differentiated, within whose budget gradients are."""

    def step() -> None:
        net(*inputs).backward()

    return Drawn(step, partial(warm_peak, step, list(nn.ModuleList(modules).parameters())), lambda: ts.report(net).plan)


def loop(draw: random.Random) -> tuple[Drawn, int]:
    """A simulation whose parameters are small beside its state."""
    rows, width, count = draw.choice((64, 256)), draw.choice((64, 256)), draw.randint(5, 60)
    start, push = torch.randn(rows, width), nn.Parameter(torch.randn(width))
    kind = draw.randrange(3)

    def one(state: Tensor) -> Tensor:
        if kind == 0:
            return state + 0.1 * torch.tanh(state * push)
        if kind == 1:
            return torch.fft.irfft(torch.fft.rfft(state) * 0.9, n=width) + push
        return state + 0.01 * torch.sin(state.roll(1, 0) - state) * torch.sigmoid(state) + 0.01 * push

    def made(budget: int | None) -> Drawn:
        net = ts.Loop(one, budget=budget)

        def step() -> None:
            net(start, count).sum().backward()  # of a sum, neither result nor gradient takes memory

        return Drawn(step, partial(warm_peak, step, [push]), lambda: ts.report(net).plan)

    return between(draw, made)


def streamed(draw: random.Random) -> tuple[Drawn, int]:
    """Blocks of a `ts.stream`, with AdamW."""
    width, rows = draw.choice((64, 128, 256)), draw.choice((128, 512))
    seed, count, update = draw.random(), draw.randint(3, 12), draw.choice(("step", "backward"))
    x = torch.randn(rows, 32)

    def made(budget: int | None) -> Drawn:
        model = Stack(layers(random.Random(seed), count, width, even=True), width)
        ts.stream(model, device="cpu", blocks=list(model.blocks), budget=budget)
        optimizer = ts.optimizer(model, torch.optim.AdamW, update=update)

        def step() -> None:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()

        def peak() -> int:
            step()
            gc.collect()
            return streamed_peak_nbytes(model, step, "cpu")

        return Drawn(step, peak, lambda: ts.report(model).plan)

    return between(draw, made)


def warm_peak(step: Run, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes at the peak of a step that begins without gradients."""
    parameters = list(parameters)

    def begin() -> None:
        for p in parameters:
            p.grad = None

    for _ in range(SETTLED):
        begin()
        step()
    begin()
    gc.collect()
    return peak_nbytes(step, "cpu") - RESULT


KINDS = {"chain": chain, "stream": streamed, "program": program, "loop": loop}


def rows(chosen: Settings) -> Iterator[Row]:
    """One for each front end."""
    for name, drawn in KINDS.items():
        found = [measured(name, drawn, number) for number in range((8 if chosen.quick else DRAWN) // len(KINDS))]
        off = [peak / planned - 1 for _, planned, peak in found]
        middle, above = median(map(abs, off)), sum(peak > budget for budget, _, peak in found)
        kept = middle <= MEDIAN and max(map(abs, off)) <= WORST and not above
        yield {
            "front end": name, "pairs": len(found), "off in the median": round(middle, 4),
            "most above the plan": round(max(off), 4), "most below": round(min(off), 4), "above the budget": above,
            "claim": f"at most {MEDIAN}, all within {WORST}, none above the budget", "met": yes(kept),
        }  # fmt: skip


def measured(name: str, drawn: Callable[[random.Random], tuple[Drawn, int]], number: int) -> tuple[int, int, int]:
    """Bytes of one budget, and the peak as planned and as measured."""
    torch.manual_seed(number)
    ours, budget = drawn(random.Random(f"{name} {number}"))
    peak = ours.peak()
    return budget, ours.plan().peak_nbytes, peak


def main(device: str = "cpu", name: str = "plans_kept") -> None:
    """Measure all front ends."""
    chosen = settings(device)
    save(name, TITLE, chosen, rows(chosen), drawn=DRAWN)


if __name__ == "__main__":
    main()
