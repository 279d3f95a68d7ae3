"""Front ends inside front ends: what is inside runs as plain code, and the budget around it holds."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, InputError

MACHINE = ts.Machine({pair: ts.Link(1e9, 0) for pair in itertools.permutations(ts.Tier, 2)})


class Inner(nn.Module):
    """``times`` uses of one weight, by a front end or by plain code."""

    def __init__(self, how: str, times: int = 3, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.5, width))
        self.rows = torch.linspace(0.5, 0.7, times)
        self.how, self.times = how, times
        self.run = getattr(self, f"with_{how}", self.plain) if how != "plain" else self.plain
        self.made: dict[str, Any] = {
            "loop": lambda: ts.Loop(self.once, budget="1MiB"),
            "inputs": lambda: ts.Loop(self.with_row, budget="1MiB"),
            "outputs": lambda: ts.Loop(self.with_output, budget="1MiB"),
            "until": lambda: ts.Loop(self.counted, budget="1MiB"),
            "chain": lambda: ts.Chain([self.once] * times, budget="1MiB"),
            "join": lambda: ts.Join([[self.once] * times, [self.once]], budget="1MiB"),
            "program": lambda: ts.Program(self.plain_once, budget="1MiB"),
        }
        self.front = self.made[how.removeprefix("plain_")]()

    def once(self, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * self.weight)

    def with_row(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(y * self.weight) * x

    def with_output(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.once(y)
        return y, y * self.weight

    def counted(self, state: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        return self.once(state[0]), state[1] + 1

    def plain_once(self, y: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            y = self.once(y)
        return y

    def plain(self, y: torch.Tensor) -> torch.Tensor:
        how = self.how.removeprefix("plain_")
        if how == "inputs":
            for row in self.rows:
                y = self.with_row(y, row)
        elif how == "outputs":
            outputs = []
            for _ in range(self.times):
                y, output = self.with_output(y)
                outputs.append(output)
            y = y + torch.stack(outputs).sum(0)
        elif how == "join":
            y = self.plain_once(y) + self.once(y)
        else:
            y = self.plain_once(y)
        return y

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        front = self.front
        if self.how.startswith("plain_"):
            return self.plain(y)
        if self.how == "loop":
            return front(y, steps=self.times)
        if self.how == "inputs":
            return front(y, inputs=self.rows)
        if self.how == "outputs":
            y, outputs = front(y, steps=self.times, outputs="stack")
            return y + outputs.sum(0)
        if self.how == "until":
            return front((y, 0), until=lambda state: state[1] == self.times)[0]
        if self.how == "join":
            one, other = front(y, y)
            return one + other
        return front(y)


INNER = ["loop", "inputs", "outputs", "until", "chain", "join", "program"]


def outer_calls(
    outer: str, inner: Callable[[torch.Tensor], torch.Tensor], times: int = 4, budget: int | str = "1MiB"
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(y: torch.Tensor) -> torch.Tensor:
        return inner(y) * 1.01

    def function(y: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            y = step(y)
        return y

    if outer == "Loop":
        loop = ts.Loop(step, budget=budget)
        return lambda y: loop(y, steps=times)
    if outer == "Chain":
        return ts.Chain([step] * times, budget=budget)
    if outer == "Join":
        join = ts.Join([[step] * times], budget=budget)
        return lambda y: join(y)[0]
    if outer == "Program":
        return ts.Program(function, budget=budget)
    return function


def calls_of(outer: str, how: str, *, warm: bool) -> Iterator[tuple[torch.Tensor, ...]]:
    inner, x = Inner(how), torch.linspace(0.2, 1.0, 4).requires_grad_()
    if warm:
        inner(x).sum().backward()
        inner.weight.grad = x.grad = None
    run = outer_calls(outer, inner)
    for _ in range(3):
        loss = run(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert inner.weight.grad is not None
        assert x.grad is not None
        yield loss.detach(), inner.weight.grad.clone(), x.grad.clone()
        inner.weight.grad = x.grad = None


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("outer", ["Loop", "Chain", "Join", "Program"])
def test_what_is_inside_is_exact(outer: str, how: str, warm: bool) -> None:
    if how == "program" and outer == "Join":
        pytest.skip("a Join of one branch is a Chain, which is tried")
    wanted = calls_of("plain", f"plain_{how}", warm=False)
    for found, expected in zip(calls_of(outer, how, warm=warm), wanted, strict=True):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner(how) for _ in range(6))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(y) * 1.01
        return y


@pytest.mark.parametrize("home", ["device", "disk"])
@pytest.mark.parametrize("how", INNER)
def test_inside_streamed_blocks(how: str, home: str, tmp_path: Path) -> None:
    plain, model, x = Model(f"plain_{how}"), Model(how), torch.linspace(0.2, 1.0, 4)
    folder = {"folder": tmp_path} if home == "disk" else {}
    streamed = ts.stream(model, device="cpu", budget="1MiB", home=home, machine=MACHINE, **folder)
    for _ in range(2):
        for one in (plain, streamed):
            one.zero_grad()
            one(x).square().sum().backward()
        for a, b in zip(plain.parameters(), streamed.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("outer", ["Loop", "Chain", "Program"])
@pytest.mark.parametrize("how", ["loop", "chain", "program"])
def test_the_budget_around_holds(outer: str, how: str) -> None:
    """What is inside holds nothing beside it: the least budget that is named suffices, and is kept."""
    inner, x = Inner(how, times=6, width=20_000), torch.linspace(0.2, 1.0, 20_000).requires_grad_()

    with pytest.raises(BudgetError) as refused:
        outer_calls(outer, inner, 12, 10)(x)
    run = outer_calls(outer, inner, 12, int(refused.value.least_nbytes))
    run(x).sum().backward()  # type: ignore[no-untyped-call]
    inner.weight.grad = x.grad = None
    with ts.track_memory() as meter:
        run(x).sum().backward()  # type: ignore[no-untyped-call]
    of_gradients = 3 * 4 * 20_000  # of the argument, the weight and the result
    assert meter.peak_nbytes <= refused.value.least_nbytes * 1.02 + of_gradients + 16 * 1024


def test_every_output_of_a_loop_inside() -> None:
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def inner(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(y * weight)
        return y, y + 1

    def with_sum(y: torch.Tensor) -> torch.Tensor:
        loop = ts.Loop(inner)
        y, total = loop(y, steps=5, outputs="sum", every=2)
        y, none = loop(y, steps=1, outputs="stack", every=2)
        assert none is None
        _, found = loop(y, steps=2, outputs=lambda output: output)
        assert [output.requires_grad for output in found] == [False, False]
        return y + total

    def plain(y: torch.Tensor) -> torch.Tensor:
        total = None
        for step in range(5):
            y, output = inner(y)
            if step % 2:
                total = output if total is None else total + output
        assert total is not None
        return inner(y)[0] + total

    x = torch.linspace(0.1, 0.9, 3)
    (wanted,) = torch.autograd.grad(plain(plain(x)).sum(), weight)
    (found,) = torch.autograd.grad(ts.Chain([with_sum, with_sum], budget="1MiB")(x).sum(), weight)
    assert torch.equal(found, wanted)


def test_inputs_that_carry_gradients_into_a_loop_inside() -> None:
    def inner(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y * x)

    loop = ts.Loop(inner)
    rows, x = torch.linspace(0.5, 1.5, 210).reshape(70, 3).requires_grad_(), torch.linspace(0.1, 0.9, 3)
    y = x
    for row in rows.unbind(0):
        y = inner(y, row)
    (wanted,) = torch.autograd.grad(y.sum(), rows)
    (found,) = torch.autograd.grad(ts.Program(lambda: loop(x, inputs=rows).sum(), budget="1MiB")(), rows)
    assert torch.equal(found, wanted)


def test_conditions_that_are_not_reached_inside() -> None:
    loop = ts.Loop(torch.tanh)
    chain = ts.Chain([lambda y: loop(y, until=lambda y: False, max_steps=3)], budget="1MiB")
    with pytest.raises(InputError, match="after 3 steps"):
        chain(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize("outer", ["Chain", "Loop", "Program"])
def test_what_cannot_be_plain_inside_is_refused_by_name(outer: str, tmp_path: Path) -> None:
    compiled = ts.Loop(torch.tanh, compile="eager")
    disk = {"home": "disk", "machine": MACHINE, "folder": tmp_path}
    streamed = ts.stream(Model("plain_loop"), device="cpu", budget="1MiB", **disk)
    for inner, name in ((lambda y: compiled(y, steps=2), "a compiled ts.Loop"), (streamed, "a streamed Model")):
        with pytest.raises(InputError, match=f"{name} is called inside"):
            outer_calls(outer, inner)(torch.ones(4, requires_grad=True))


class Owner(nn.Module):
    """A module that has front ends of its own methods among its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.loop = ts.Loop(self.step, budget="1MiB")
        self.below = nn.Sequential(ts.Chain([self.step, self.step], budget="1MiB"))

    def step(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.cell(y))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.below(self.loop(y, until=lambda y: self.calls > 2, max_steps=9))


def test_front_ends_that_are_attributes_of_the_module_whose_methods_they_run() -> None:
    torch.manual_seed(0)
    model = Owner()
    assert list(model.state_dict()) == ["calls", "cell.weight", "cell.bias"]
    model.load_state_dict(model.state_dict())
    assert len(list(model.parameters())) == len(list(model.loop.parameters())) == 2
    assert not copy.deepcopy(model.eval().double()).loop._stage.modules[0].training
    assert "Loop" in repr(model.float().train())
    x = torch.randn(2, 3)
    y = x
    for _ in range(5):
        y = torch.tanh(model.cell(y))
    wanted = torch.autograd.grad(y.sum(), model.cell.weight)
    for _ in range(2):
        model.calls.zero_()
        found = torch.autograd.grad(model(x).sum(), model.cell.weight)
        assert model.calls == 5
        torch.testing.assert_close(found, wanted)  # the weight is used by two front ends, one after the other


def test_a_front_end_of_a_module_that_it_is_not_in_registers_it() -> None:
    model = Owner()
    loop = ts.Loop(lambda y: model.step(y))
    assert "modules_of_step.0.cell.weight" in loop.state_dict()
    assert not loop.eval().modules_of_step[0].training


def test_the_counts_of_a_loop_inside_are_its_own() -> None:
    """Snapshots and guards of the outer one leave them alone."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ts.Loop(lambda y: torch.sin(y * weight), budget="1MiB")

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return self.inner(y, steps=2)

    holder = Holder()
    chain = ts.Chain([holder, holder], budget="1MiB")
    for _ in range(2):
        waiting = holder.inner(torch.ones(3), steps=50)
        held = holder.inner._live_nbytes
        chain(torch.ones(3)).sum().backward()
        assert holder.inner._live_nbytes == held > 0
        waiting.sum().backward()
    assert holder.inner._live_nbytes == 0
