"""Steps that take more and more: planned for once they are seen, in the same call where that is possible."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.loop import growth

STEPS = 24


class Growing(nn.Module):
    """A step whose tape has more rows each time: its state counts them. It draws, and counts in a buffer."""

    def __init__(self, rows: int = 60) -> None:
        super().__init__()
        self.rows = rows
        self.mix = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, state: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        h, step = state
        many = h.repeat(1 + step * self.rows // 4, 1)
        return self.drop(self.norm(torch.tanh(self.mix(many))))[:4] + h, step + 1


def plainly(model: Growing, steps: int = STEPS) -> torch.Tensor:
    state = torch.linspace(-1, 1, 32).reshape(4, 8), 0
    for _ in range(steps):
        state = model(state)
    return state[0].square().sum()


def made(seed: int = 0) -> Growing:
    torch.manual_seed(seed)
    return Growing()


def state_of(model: Growing, loss: torch.Tensor) -> list[torch.Tensor]:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def held_nbytes(step: Callable[[], torch.Tensor], model: Growing) -> int:
    model.zero_grad()
    with ts.track_memory() as meter:
        step().backward()  # type: ignore[no-untyped-call]
    return meter.peak_nbytes - sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def plain_nbytes() -> int:
    model = made()
    return held_nbytes(lambda: plainly(model), model)


@pytest.mark.parametrize("share", [0.6, 0.35])
def test_it_is_planned_for_in_the_same_call(share: float, plain_nbytes: int) -> None:
    budget, plain, model = int(share * plain_nbytes), made(), made()
    start = torch.linspace(-1, 1, 32).reshape(4, 8), 0
    run = ts.Loop(model, budget=budget)
    for call in range(3):
        found = []
        for one, step in ((plain, lambda: plainly(plain)), (model, lambda: run(start, steps=STEPS)[0].square().sum())):
            torch.manual_seed(call)
            one.zero_grad()
            loss = step()
            loss.backward()  # type: ignore[no-untyped-call]
            found.append(state_of(one, loss))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    held = held_nbytes(lambda: run(start, steps=STEPS)[0].square().sum(), model)
    assert held <= growth.limit_of(budget)
    assert run.plan.peak_nbytes <= budget


def test_the_least_that_is_named_counts_steps_that_have_grown(plain_nbytes: int) -> None:
    model, start = made(), (torch.linspace(-1, 1, 32).reshape(4, 8), 0)
    budget = plain_nbytes // 20
    with pytest.raises(BudgetError, match="even with a single restart checkpoint") as refused:
        ts.Loop(model, budget=budget)(start, steps=STEPS)
    least = int(refused.value.least_nbytes)
    run = ts.Loop(model, budget=least)
    run(start, steps=STEPS)[0].sum().backward()
    held = held_nbytes(lambda: run(start, steps=STEPS)[0].square().sum(), model)
    assert held <= growth.limit_of(least)


def test_a_function_of_the_user_is_not_told_twice(plain_nbytes: int) -> None:
    model, told = made(), list[int]()

    def step(state: Any) -> Any:
        state = model(state)
        return state, state[0].sum()

    def tell(output: torch.Tensor) -> None:
        told.append(1)

    run, start = ts.Loop(step, budget=int(0.6 * plain_nbytes)), (torch.linspace(-1, 1, 32).reshape(4, 8), 0)
    with pytest.warns(ts.BudgetExceeded, match="a call holds"):
        (state, _), _ = run(start, steps=STEPS, outputs=tell)
    assert len(told) == STEPS
    state.sum().backward()


def test_stacked_outputs_begin_anew(plain_nbytes: int) -> None:
    model, plain = made().eval(), made().eval()

    def stepped(state: Any, model: Growing) -> Any:
        state = model(state)
        return state, state[0] * 2

    start, outputs = (torch.linspace(-1, 1, 32).reshape(4, 8), 0), []
    state: Any = start
    for _ in range(STEPS):
        state, output = stepped(state, plain)
        outputs.append(output)
    run = ts.Loop(lambda state: stepped(state, model), budget=int(0.6 * plain_nbytes))
    _, found = run(start, steps=STEPS, outputs="stack")
    assert torch.equal(found, torch.stack(outputs))
    (gradient,) = torch.autograd.grad(found.sum(), model.mix.weight)
    (wanted,) = torch.autograd.grad(torch.stack(outputs).sum(), plain.mix.weight)
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("verify", [False, True])
def test_what_only_backward_shows_is_said(verify: bool, plain_nbytes: int) -> None:
    """Of a run of unknown length the last step is recorded in the backward."""
    model, start = made(), (torch.linspace(-1, 1, 32).reshape(4, 8), 0)
    run = ts.Loop(model, budget=int(0.35 * plain_nbytes), verify=verify, planner="online")

    def call() -> torch.Tensor:
        out: torch.Tensor = run(start, until=lambda state: state[1] == STEPS)[0]
        return out.sum()

    loss = call()
    if verify:
        with pytest.raises(BudgetError, match="a call holds"):
            loss.backward()  # type: ignore[no-untyped-call]
    else:
        with pytest.warns(ts.BudgetExceeded, match="later calls are planned for that"):
            loss.backward()  # type: ignore[no-untyped-call]
    call().backward()  # type: ignore[no-untyped-call]  # said once
    assert "a call holds" in str(run.exceeded.last)


def test_a_later_call_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch, plain_nbytes: int) -> None:
    monkeypatch.setattr(growth, "_SHARE", 1e9)  # look at every call
    model = Growing(rows=0)
    run, start = ts.Loop(model, budget=int(0.6 * plain_nbytes)), (torch.linspace(-1, 1, 32).reshape(4, 8), 0)
    for _ in range(3):
        run(start, steps=STEPS)[0].sum().backward()
    planned = run.plan
    object.__setattr__(model, "rows", 60)
    run(start, steps=STEPS)[0].sum().backward()
    assert run.plan.profile.stages[0].saved_nbytes > planned.profile.stages[0].saved_nbytes


def test_sweeps_that_need_their_graph_hold_one_step(plain_nbytes: int) -> None:
    """A gradient inside of a step: the graph of a step goes before that of the next is made, and plans count it."""
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    start = torch.randn(128, 8)

    def step(z: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            z = z if z.requires_grad else z.requires_grad_()
            dz = field(z)
            (slope,) = torch.autograd.grad(dz.square().sum(), z, create_graph=True)
        return z + 0.05 * dz - 0.01 * slope

    with pytest.raises(BudgetError) as refused:
        ts.Loop(step, budget=1000)(start.clone(), steps=20)
    least = int(refused.value.least_nbytes)
    for outputs, factor in itertools.product((None, "sum"), (1.0, 1.3)):
        body = step if outputs is None else lambda z: (found := step(z), found * 2)
        run = ts.Loop(body, budget=int(factor * least) + 64 * 1024 * (outputs is not None))

        def call(run: ts.Loop = run, outputs: str | None = outputs) -> None:
            field.zero_grad()
            state = run(start.clone(), steps=20, outputs=outputs)
            (state if outputs is None else state[1]).square().mean().backward()

        call()
        with ts.track_memory() as meter:
            call()
        own = sum(p.grad.nbytes for p in field.parameters() if p.grad is not None) + 2 * start.nbytes
        assert meter.peak_nbytes - own <= growth.limit_of(run.budget.device_nbytes)
