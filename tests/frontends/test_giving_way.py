"""A step that is skipped, a loss that a variable still names: calls that wait for nothing give way to later ones."""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.storage.meter import track_memory

Run = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[int | ts.Budget], Run]
torch.manual_seed(0)
STAGES = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
X = torch.randn(64, 64)


def chain(budget: int | ts.Budget) -> Run:
    return ts.Chain(STAGES, budget=budget)


def join(budget: int | ts.Budget) -> Run:
    return ts.Join([STAGES], nn.Identity(), budget=budget)


def loop(budget: int | ts.Budget) -> Run:
    return partial(ts.Loop(STAGES[0], budget=budget), steps=12)


def open_loop(budget: int | ts.Budget) -> Run:
    counted = torch.tensor(0)

    def step(state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return STAGES[0](state[0]), state[1] + 1

    run = ts.Loop(step, budget=budget)
    return lambda x: run((x, counted), until=lambda state: bool(state[1] >= 12))[0]  # type: ignore[no-any-return]


def plain(make: object) -> Run:
    stages = [STAGES[0]] * 12 if make in (loop, open_loop) else STAGES

    def run(x: torch.Tensor) -> torch.Tensor:
        for stage in stages:
            x = stage(x)
        return x

    return run


def program(budget: int | ts.Budget) -> Run:
    return ts.Program(plain(program), budget=budget)


MAKES = [chain, join, loop, open_loop, program]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    yield
    for stage in STAGES:
        stage.zero_grad()


def least(make: Make) -> int:
    """The least budget in which one call works, and its backward."""
    budget = 1
    for _ in range(8):
        try:
            make(budget)(X).square().sum().backward()
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = error.least_nbytes
        else:
            return budget
        finally:
            for stage in STAGES:
                stage.zero_grad()
    raise AssertionError("each least was refused in turn")


def trained(run: Run, skipped: int) -> list[torch.Tensor]:
    """Gradients of steps of which one is skipped while its loss lives on."""
    found = []
    for k in range(4):
        loss = run(X * (k + 1)).square().sum()
        if k == skipped:
            continue
        loss.backward()
        found += [p.grad.clone() for stage in STAGES for p in stage.parameters() if p.grad is not None]
        for stage in STAGES:
            stage.zero_grad()
    return found


@pytest.mark.parametrize("make", MAKES)
def test_a_step_that_is_skipped(make: Make) -> None:
    budget = least(make)
    wanted = trained(plain(make), 1)
    run = make(budget)
    assert all(map(torch.equal, trained(run, 1), wanted))
    gc.collect()
    with track_memory() as meter:
        trained(run, 1)
    gradients = sum(p.nbytes for stage in STAGES for p in stage.parameters())
    beside = 4 * X.nbytes + 2 * 3 * gradients  # losses and what is compared
    assert meter.peak_nbytes <= 1.05 * budget + beside


@pytest.mark.parametrize("make", MAKES)
def test_a_backward_that_needs_what_gave_way_says_so_before_anything_is_used(make: Make) -> None:
    run = make(least(make))
    for together in (True, False):
        first = run(X).square().sum()
        second = run(2 * X).square().sum()
        loss = first + second if together else first
        with pytest.raises(BudgetError, match=r"gave way to a later one.*did not fit beside it") as told:
            loss.backward()
        assert all(p.grad is None for stage in STAGES for p in stage.parameters())
    assert told.value.least_nbytes is not None
    wanted = torch.autograd.grad(both(plain(make)), [*STAGES[0].parameters()])
    # A program's first call does not take all there is, and keeps what it has for the time being.
    shared = ts.Budget(told.value.least_nbytes, calls=1 if make is program else 2)
    found = torch.autograd.grad(both(make(shared)), [*STAGES[0].parameters()])
    assert all(map(torch.equal, wanted, found))


def both(run: Run) -> torch.Tensor:
    return run(X).square().sum() + run(2 * X).square().sum()


@pytest.mark.parametrize("make", MAKES)
def test_the_later_one_goes_on(make: Make) -> None:
    run = make(least(make))
    first = run(X).square().sum()
    second = run(2 * X).square().sum()
    (wanted,) = torch.autograd.grad(plain(make)(2 * X).square().sum(), STAGES[0][0].weight)
    assert torch.equal(torch.autograd.grad(second, STAGES[0][0].weight)[0], wanted)
    del first


@pytest.mark.parametrize("make", MAKES)
def test_nothing_gives_way_to_what_does_not_fit_either(make: Make) -> None:
    run = make(least(make))
    first = run(X).square().sum()
    with pytest.raises(BudgetError):
        run(X.repeat(4, 1))
    (wanted,) = torch.autograd.grad(plain(make)(X).square().sum(), STAGES[0][0].weight)
    assert torch.equal(torch.autograd.grad(first, STAGES[0][0].weight)[0], wanted)


@pytest.mark.parametrize("make", MAKES)
def test_where_there_is_room_for_both_none_gives_way(make: Make) -> None:
    wanted = torch.autograd.grad(both(plain(make)), [*STAGES[0].parameters()])
    found = torch.autograd.grad(both(make(2**24)), [*STAGES[0].parameters()])
    assert all(map(torch.equal, wanted, found))


def test_a_copy_awaits_nothing(tmp_path: Any) -> None:
    import copy

    run = ts.Chain(STAGES, budget=least(chain))
    waits = run(X)
    other = copy.deepcopy(run)
    other(X).sum().backward()
    assert waits.requires_grad
