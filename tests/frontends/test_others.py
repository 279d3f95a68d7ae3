"""Calls that await their backward: what they hold, what they keep others from, and when they are no longer awaited."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.module.stream import is_streamed


class Boom(Exception):
    pass


def boom(gradient: torch.Tensor) -> None:
    raise Boom


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def streamed(budget: int, folder: Path | None) -> Net:
    net = Net()
    ts.stream(net, budget=budget, folder=folder, device="cpu", home="disk" if folder else "device")
    return net


def least(make: Callable[[int], Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> int:
    with pytest.raises(BudgetError) as told:
        make(1)(x)
    assert told.value.least_nbytes is not None
    return told.value.least_nbytes


X = torch.ones(256, 32).cumsum(0) / 256


def chained(budget: int) -> ts.Chain:
    net = Net()
    return ts.Chain([*net.blocks, net.head], budget=budget)


def looped(budget: int) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    step = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    run = ts.Loop(step, budget=budget)
    return lambda x: run(x, steps=20)


def programmed(budget: int) -> Callable[[torch.Tensor], torch.Tensor]:
    net = Net()
    run = ts.Program(net, budget=budget)
    return lambda x: run(x)


@pytest.mark.parametrize("make", [chained, looped, programmed, lambda budget: streamed(budget, None)])
def test_a_backward_that_has_failed_outside_holds_nothing_of_the_budget(make: Any) -> None:
    """PyTorch keeps the graph of a failed backward until the thread's next one."""
    allowed = int(1.3 * least(make, X.clone().requires_grad_()))
    run = make(allowed)
    x = X.clone().requires_grad_()
    run(x).sum().backward()
    for before in (True, False) * 2:
        fails = failing_before(run, x) if before else failing_after(run, x)
        with pytest.raises(Boom):
            fails.backward()
        del fails
        gc.collect()
        run(x).sum().backward()


def failing_before(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A loss whose backward fails before it reaches the model."""
    scale = torch.ones((), requires_grad=True) * 1
    scale.register_hook(boom)
    return (run(x) * scale).sum()


def failing_after(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """One whose backward fails when it has passed the model."""
    y = x * 2
    y.register_hook(boom)
    return run(y).sum()


def test_unstream_between_a_call_and_its_backward(tmp_path: Path) -> None:
    for budget in (2**20, least(lambda budget: streamed(budget, tmp_path), X)):
        net = streamed(budget, tmp_path)
        loss = net(X).sum()
        ts.unstream(net)
        with pytest.raises(GradientError, match=r"unstream\(\) was called between this call"):
            loss.backward()
        net(X).sum().backward()
        assert all(p.grad is not None for p in net.parameters())
    net = streamed(2**20, None)
    loss = net(X).sum()
    ts.unstream(net)
    loss.backward()
    assert all(p.grad is not None for p in net.parameters())


def test_the_budget_that_live_calls_leave_is_told_as_such() -> None:
    enough = least(chained, X)
    net = chained(int(2.5 * enough))
    first = net(X)
    later = net(X * 2)  # the first one gives way: see test_giving_way
    with pytest.raises(BudgetError, match="calls whose backward has not run yet hold") as told:
        first.sum().backward()
    del first, later
    assert told.value.least_nbytes is not None
    net = chained(told.value.least_nbytes)
    both = net(X), net(X * 2)
    sum(one.sum() for one in both).backward()  # type: ignore[union-attr]


def test_a_forked_child_is_told_that_the_files_are_its_parents(tmp_path: Path) -> None:
    script = """
import os, sys
import torch
import tapestream as ts
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
ts.stream(net, budget=80_000, folder=sys.argv[1], device="cpu")
x = torch.ones(4, 64)
net(x).sum().backward()
child = os.fork()
if not child:
    try:
        with torch.no_grad():
            net(x)
    except ts.InputError as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
net(x).sum().backward()
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.stdout.strip() == "7", found.stderr
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("engine", "v8", "engines are 'auto'"), ("machine", "fast", "no Machine"), ("folder", "", "path of a folder"),
        ("gradients_within", "yes", "True or False"),
    ],
)  # fmt: skip
def test_kinds_of_arguments(name: str, value: Any, told: str) -> None:
    for make in (lambda **given: ts.Chain([torch.tanh], **given), lambda **given: ts.Program(torch.tanh, **given)):
        with pytest.raises(InputError, match=told):
            make(**{name: value})
    if name != "gradients_within":
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        with pytest.raises(InputError, match=told):
            ts.stream(layers, **{name: value})
        with pytest.raises(InputError, match="verify='yes'"):
            ts.stream(layers, verify="yes")  # type: ignore[arg-type]
        assert not is_streamed(layers)


def test_plans_and_tensors_of_inference_mode() -> None:
    with pytest.raises(InputError, match="no Plan"):
        ts.Chain([torch.tanh], plan="p.json")  # type: ignore[arg-type]
    with torch.inference_mode():
        x = torch.ones(3, 32)
    with pytest.raises(InputError, match="made in inference mode"):
        chained(2**20)(x)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA GPU"):
            ts.Chain([torch.tanh], device="cuda")
