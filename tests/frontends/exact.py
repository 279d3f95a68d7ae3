"""Training twice, once by plain PyTorch and once by a Chain, and comparing every bit."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from models import Case, Stages
from place import DEVICE
from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.chain import Chain

PLANNERS = ("store_all", "periodic", "bisection", "revolve", "rotor", "auto")
LEVELS = ("full", "most", "half", "least")
"""How tight the budget is: all that storing everything takes, 75% of it, 50%, or the least that the planner can do
with."""


def plain(stages: Stages) -> Callable[[Any], Any]:
    """The stages one after the other."""

    def run(state: Any) -> Any:
        for stage in stages:
            state = stage(state)
        return state

    return run


def modules_of(stages: Stages) -> nn.ModuleList:
    return nn.ModuleList(stage for stage in stages if isinstance(stage, nn.Module))


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def copy_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """On the CPU, wherever it lies."""
    return None if tensor is None else tensor.detach().cpu().clone()


Trace = dict[str, torch.Tensor | None]


def train(call: Callable[[Any], Any], stages: Stages, case: Case, steps: int = 3, micro_batches: int = 1) -> Trace:
    """Everything that ``steps`` of SGD with momentum leave behind, by name."""
    owner = modules_of(stages)
    trainable = [p for p in owner.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9) if trainable else None
    seed(3)
    trace: Trace = {}
    for step in range(steps):
        for micro in range(micro_batches):
            x = case.batch()
            if case.input_requires and x.is_floating_point():
                x.requires_grad_()
            with torch.autocast(DEVICE, torch.bfloat16) if case.autocast else contextlib.nullcontext():
                loss = case.loss(call(case.state(x)))
            loss.backward()
            trace[f"{step}.{micro} loss"] = copy_of(loss)
            trace[f"{step}.{micro} input"] = copy_of(x.grad)
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in owner.named_parameters()}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        trace |= {f"{step} after {name}": copy_of(p) for name, p in owner.named_parameters()}
        trace |= {f"{step} buffer {name}": copy_of(b) for name, b in owner.named_buffers()}
    trace["torch"] = torch.get_rng_state()
    trace["numbers"] = torch.tensor([random.random(), float(numpy.random.rand())], dtype=torch.float64)
    return trace


def assert_same(expected: Trace, found: Trace) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), f"{name}: {tensor} against {other}"
        if tensor is not None and other is not None:
            assert tensor.dtype == other.dtype, name
            assert torch.equal(tensor, other), f"{name}: differs by up to {(tensor - other).abs().max()}"


def called_once(case: Case, stages: Stages, **options: Any) -> Chain:
    """A chain that has made its plan."""
    net = Chain(stages, **options)
    x = case.batch()
    if case.input_requires and x.is_floating_point():
        x.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16) if case.autocast else contextlib.nullcontext():
        net(case.state(x))
    return net


def budget_at(level: str, case: Case, planner: str) -> int:
    """Bytes of one of LEVELS for this chain and planner (the least that works where the level is below that)."""
    seed(1)
    plan = called_once(case, case.stages(), planner="store_all").plan
    assert plan is not None
    share = {"full": 1.0, "most": 0.75, "half": 0.5, "least": 0.0}[level]
    asked = max(1, int(share * plan.peak_nbytes))
    try:
        called_once(case, case.stages(), planner=planner, budget=asked)
    except BudgetError as error:
        assert error.least_nbytes is not None  # noqa: PT017
        assert error.least_nbytes > asked  # noqa: PT017
        return error.least_nbytes + case.slack_nbytes
    return asked + case.slack_nbytes


def assert_exact(case: Case, planner: str, level: str, micro_batches: int = 1) -> Chain:
    """Train by both and compare; returns the chain."""
    budget = budget_at(level, case, planner)
    ours, theirs = case.stages(), case.stages()
    net = Chain(ours, planner=planner, budget=budget)
    expected = train(plain(theirs), theirs, case, micro_batches=micro_batches)
    assert_same(expected, train(net, ours, case, micro_batches=micro_batches))
    assert net.plan is None or net.plan.peak_nbytes <= budget
    return net
