"""What a refusal offers: budgets that work, each with its time."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.costs import Profile, StageCost
from tapestream.errors import Allowance, BudgetError
from tapestream.planning.allowances import KNEE
from tapestream.planning.auto import make_plan


def chain(stages: int, saved: int = 5000, state: int = 1000, extra: int = 0) -> Profile:
    cost = StageCost(
        output_nbytes=state, saved_nbytes=saved, forward_seconds=1.0, backward_seconds=2.0,
        backward_extra_nbytes=extra,
    )  # fmt: skip
    return Profile((cost,) * stages, state)


def refused(within: Callable[[int], object]) -> BudgetError:
    with pytest.raises(BudgetError) as told:
        within(1)
    return told.value


@pytest.mark.parametrize("planner", ["auto", "revolve", "periodic"])
@pytest.mark.parametrize("stages", [4, 12, 60])
def test_each_is_what_comes_when_it_is_followed(stages: int, planner: str) -> None:
    within = partial(make_plan, chain(stages), planner=planner)
    found = refused(within).budgets
    assert within(found[-1].nbytes).budgets == found
    assert [one.name for one in found] in (["least", "knee", "all"], ["least", "all"], ["all"])
    assert [one.nbytes for one in found] == sorted(one.nbytes for one in found)
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)
    for one in found:
        plan = within(one.nbytes)
        assert plan.peak_nbytes <= one.nbytes
        assert plan.seconds <= one.seconds
        assert one.times_plain == pytest.approx(one.seconds / plan.stored_seconds)
    assert all(one.times_plain <= KNEE for one in found if one.name == "knee")
    assert found[-1].times_plain == 1.0 or planner != "auto"  # which may store states alone


def test_everything_stored_is_the_one_where_nothing_takes_less() -> None:
    error = refused(partial(make_plan, chain(1)))
    assert [one.name for one in error.budgets] == ["all"]
    assert error.budgets[0].times_plain == 1.0


def test_the_message_says_them_and_nobody_plans_before_it_is_read() -> None:
    asked = list[int]()

    def offers() -> tuple[Allowance, ...]:
        asked.append(1)
        return Allowance("least", 100, 8.0, 4.0), Allowance("all", 300, 2.0, 1.0)

    error = BudgetError("too small", least_nbytes=100, offers=offers)
    other = error.saying("much too small")
    assert not asked
    said = "{}. Times plain PyTorch's time, as planned: the least, 100 bytes: 4.00; as fast as any, 300 bytes: 1.00"
    assert str(error) == str(error) == said.format("too small")
    assert len(asked) == 1
    assert str(other) == said.format("much too small")
    assert str(BudgetError("alone")) == "alone"


def test_a_chain_runs_within_each() -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)]
    x = torch.randn(64, 16)
    error = refused(lambda nbytes: ts.Chain(stages, budget=nbytes)(x))
    assert {one.name for one in error.budgets} >= {"least", "all"}
    for one in error.budgets:
        ts.Chain(stages, budget=one.nbytes)(x).sum().backward()


def test_a_streamed_model_runs_within_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)])
    x = torch.randn(64, 16)

    def step(nbytes: int) -> None:
        streamed = ts.stream(model, device="cpu", home="device", budget=nbytes)
        try:
            optimizer = ts.optimizer(streamed, torch.optim.AdamW, lr=0.1)
            streamed(x).sum().backward()
            optimizer.step()
        finally:
            ts.unstream(streamed)
            model.zero_grad()

    budgets = refused(step).budgets
    assert budgets
    for one in budgets:
        step(one.nbytes)


@pytest.mark.parametrize("planner", ["auto", pytest.param("revolve", marks=pytest.mark.full)])
def test_a_program_runs_within_each(planner: str) -> None:
    weight = nn.Parameter(torch.eye(16))
    x = torch.ones(64, 16)

    def function() -> torch.Tensor:
        y = x
        for _ in range(30):
            y = torch.tanh(y @ weight) + 0.1 * y
        return y.sum()

    error = refused(lambda nbytes: ts.Program(function, budget=nbytes, planner=planner)())
    assert error.budgets[0].nbytes == error.least_nbytes
    assert [one.times_plain for one in error.budgets] == sorted(
        (one.times_plain for one in error.budgets), reverse=True
    )
    for one in error.budgets:
        run = ts.Program(function, budget=one.nbytes, planner=planner)
        for _ in range(3):
            run().backward()


@pytest.mark.parametrize("steps", [20, 400])
def test_a_loop_runs_within_each(steps: int) -> None:
    weight = nn.Parameter(torch.eye(16) / 2)
    x = torch.ones(64, 16)

    def step(state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(state @ weight) + 0.1 * state

    error = refused(lambda nbytes: ts.Loop(step, budget=nbytes)(x, steps=steps))
    assert [one.name for one in error.budgets] in (["least", "knee", "all"], ["least", "all"])
    assert error.budgets[-1].times_plain == pytest.approx(1.0)
    for one in error.budgets:
        ts.Loop(step, budget=one.nbytes)(x, steps=steps).sum().backward()
