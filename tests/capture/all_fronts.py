"""Layers by plain PyTorch and by each front end, and what a call and its backward leave."""

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tapestream as ts
from tapestream.errors import BudgetError, TapestreamError

MACHINE = ts.Machine({pair: ts.Link(1e9, 0) for pair in itertools.permutations(ts.Tier, 2)})
FRONTS, WITHOUT_STREAM = ["Chain", "Join", "Loop", "Program", "stream"], ["Chain", "Join", "Loop", "Program"]
W = 8
Run = Callable[[Any], Any]


class Layer(nn.Module):
    def __init__(self, body: Callable[["Layer", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(W, W), nn.BatchNorm1d(W), nn.Dropout(0.3)
        self.generator = torch.Generator().manual_seed(1)
        self.body = self.kind = body
        self.calls = self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not ts.recomputing():
            self.calls += 1
        return self.body(self, x)


class Net(nn.Module):
    """The plain code that all front ends stand for."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def net_for(front: str, body: Any, times: int = 3) -> Net:
    """A loop has one layer, used again and again."""
    torch.manual_seed(0)
    return Net([Layer(body)] * times if front == "Loop" else [Layer(body) for _ in range(times)])


KNOWN: dict[Any, int] = {}


def tight(make: Callable[[int, list[Any]], Any], stages: list[Any], x: Any) -> int:
    """A budget that does not hold everything, found once with copies; much if nothing is refused."""
    shapes = tuple(leaf.shape for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor))
    key = make, stages[0].kind if isinstance(stages[0], Layer) else stages[0], len(stages), shapes
    if key not in KNOWN:
        KNOWN[key], trial = 1 << 20, 1
        with torch.random.fork_rng(), contextlib.suppress(TapestreamError):
            if make is program:  # it takes longer to find its least one
                run = make(1 << 20, copy.deepcopy(stages))
                run(x)
                trial = int(run.plan.peak_nbytes * 0.75) if run.plan is not None else 1 << 20
            try:
                make(trial, copy.deepcopy(stages))(x)
                KNOWN[key] = trial
            except BudgetError as refused:
                KNOWN[key] = (refused.least_nbytes or 0) + 256
    return KNOWN[key]


def run_of(front: str, stages: list[Any], x: Any, folder: Path | None = None, budget: int | None = None) -> Run:
    """The stages one after the other, by a front end that recomputes as much as it can."""
    if front == "Chain":
        return ts.Chain(stages, planner="bisection")
    if front == "Loop":
        loop = ts.Loop(stages[0], planner="revolve", slots=2)
        return lambda x: loop(x, steps=len(stages))
    if front == "stream":
        options: dict[str, Any] = {"home": "disk", "folder": folder, "machine": MACHINE, "planner": "bisection"}
        return ts.stream(Net(stages), device="cpu", budget="64MiB", blocks=Layer, **options)
    if front == "Program":
        return program(budget or tight(program, stages, x), stages)
    join = joined(budget or tight(joined, stages, x), stages)
    return lambda x: join(x)[0]


def program(budget: int, stages: list[Any]) -> ts.Program:
    return ts.Program(lambda x: functools.reduce(lambda y, stage: stage(y), stages, x), budget=budget)


def joined(budget: int, stages: list[Any]) -> ts.Join:
    return ts.Join([stages], budget=budget)


def start() -> torch.Tensor:
    return torch.linspace(-1.5, 1.2, 4 * W).sin().reshape(4, W).requires_grad_()


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().sum()


@dataclass
class Around:
    """What is done around a call, and between it and its backward."""

    forward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    between: Callable[[], object] = lambda: None
    requires_grad: bool = True


def observed(run: Run, net: Net, around: Around, times: int = 2) -> Iterator[tuple[str, torch.Tensor | None]]:
    """All that a call and its backward leave, several times."""
    for step in range(times):
        x = start().detach().requires_grad_(around.requires_grad)
        torch.manual_seed(step)
        random.seed(step)
        with around.forward():
            loss = loss_of(run(x))
        around.between()
        with around.backward():
            loss.backward()
        yield f"{step} loss", loss.detach().clone()
        yield f"{step} generator", torch.get_rng_state()
        yield f"{step} input", x.grad
        for name, p in net.named_parameters():
            yield f"{step} {name}", None if p.grad is None else p.grad.clone()
        for name, b in net.named_buffers():
            yield f"{step} {name}", b.clone()
        net.zero_grad()


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = found[name] is None if value is None else found[name] is not None and torch.equal(found[name], value)
        assert same, name


def assert_exact(front: str, body: Any, folder: Path, around: Around | None = None, prepare: Any = None) -> None:
    seen = []
    for by in ("plain", front):
        net = net_for(front, body)
        if prepare is not None:
            prepare(net)
            for layer in net.layers:
                layer.kind = prepare
        run = net if by == "plain" else run_of(front, list(net.layers), start(), folder)
        seen.append(dict(observed(run, net, around or Around())))
    assert_same(seen[1], seen[0])
