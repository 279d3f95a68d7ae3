"""One test of each kind, through the public API: `make quick` runs this file. It needs no files of other tests."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app

WIDTH = 64
Run = Callable[[], list[torch.Tensor]]


def blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(count)]


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def gradients(modules: list[nn.Module], run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The loss, and the gradients of input and parameters, of one call with its own random numbers."""
    parameters = [p for module in modules for p in module.parameters()]
    for p in parameters:
        p.grad = None
    torch.manual_seed(2)
    x = batch().requires_grad_()
    loss = run(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in [x, *parameters] if p.grad is not None)]


def least(run: Callable[[int], Any]) -> int:
    """The budget that the error names, which must then do."""
    with pytest.raises(ts.BudgetError) as refused:
        run(1)
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_chain() -> None:
    stages = blocks(8)

    def ours(budget: int) -> list[torch.Tensor]:
        chain = ts.Chain(stages, budget=budget)
        return gradients(stages, lambda x: chain(x).square().mean())

    expected = gradients(stages, lambda x: nn.Sequential(*stages)(x).square().mean())
    assert_equal(ours(least(ours)), expected)


def test_chains_that_meet() -> None:
    stages = blocks(8)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).mean()

    def ours(budget: int) -> list[torch.Tensor]:
        join = ts.Join([stages[:4], stages[4:]], loss, budget=budget)
        return gradients(stages, lambda x: join(x, x))

    expected = gradients(stages, lambda x: loss(nn.Sequential(*stages[:4])(x), nn.Sequential(*stages[4:])(x)))
    assert_equal(ours(least(ours)), expected)


def test_a_loop() -> None:
    (cell,) = blocks(1)

    def plain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = cell(x)
        return x

    def ours(budget: int) -> list[torch.Tensor]:
        loop = ts.Loop(cell, budget=budget)
        return gradients([cell], lambda x: loop(x, steps=50).square().mean())

    assert_equal(ours(4 * least(ours)), gradients([cell], lambda x: plain(x).square().mean()))


def test_a_program() -> None:
    stages = blocks(8)

    def function(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x) + x if float(x.detach().sum()) > 0 else stage(x)
        return x.square().mean()

    def ours(budget: int) -> list[torch.Tensor]:
        return gradients(stages, ts.Program(function, budget=budget))

    assert_equal(ours(2 * least(ours)), gradients(stages, function))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_streamed_model_that_is_saved_and_goes_on(tmp_path: Path) -> None:
    plain = nn.Sequential(*blocks(6))
    first, second = (copy.deepcopy(plain) for _ in range(2))
    trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(4))

    def streamed(model: nn.Module, budget: int, folder: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        ts.stream(model, blocks=list(model), device="cpu", budget=budget, folder=tmp_path / folder)
        return model, ts.optimizer(model, torch.optim.AdamW, lr=1e-2)

    budget = least(lambda nbytes: trained(*streamed(copy.deepcopy(first), nbytes, "tried"), range(1)))
    model, optimizer = streamed(first, budget, "before")
    trained(model, optimizer, range(2))
    ts.save(tmp_path / "saves", model=model, optimizer=optimizer, step=2)
    model, optimizer = streamed(second, budget, "after")
    state = ts.load(tmp_path / "saves", model=model, optimizer=optimizer)
    trained(model, optimizer, range(state["step"], 4))
    ts.unstream(model)
    assert_equal([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])


def test_a_planner_against_every_schedule() -> None:
    """Revolve (Griewank and Walther 2000) against all ways to place checkpoints on a short chain."""
    steps = 9

    def fewest(length: int, slots: int) -> int:
        """Forward steps beside those that are recorded."""
        if slots == 1:
            return length * (length - 1) // 2
        split = (k + fewest(length - k, slots - 1) + fewest(k, slots) for k in range(1, length))
        return min(split) if length > 1 else 0

    stage = ts.StageCost(1.0, 1.0, output_nbytes=100, saved_nbytes=1)
    profile = ts.Profile((stage,) * steps, initial_nbytes=100)
    for slots in range(1, 7):
        budget = 301 + 100 * slots  # beside them: two states, a cotangent and a record
        assert ts.simulate(ts.planners["revolve"](profile, budget), profile).forwards == steps + fewest(steps, slots)


def test_a_command() -> None:
    words = "plan --layers 8 --width 512 --heads 8 --seq 512 --budget 2GiB --gpu 2GiB --ram 8GiB --json"
    found = CliRunner().invoke(make_app(), words.split())
    assert found.exit_code == 0
    assert json.loads(found.stdout)["fits"] is True
