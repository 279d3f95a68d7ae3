"""``Budget(calls=)``: room for several calls that await their backward at once, whichever front-end makes them."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from pairs import sgd
from streaming import gradients_of, streamed
from test_stream_ledger import CASE, options, peak_nbytes, tokens  # noqa: F401
from torch import nn

import tapestream as ts
from tapestream.accelerator import streams as timing
from tapestream.errors import BudgetError, InputError
from tapestream.frontends import chain as chains
from tapestream.frontends.loop import loop as loops

LENGTHS = (48, 64, 32)


def preferences(model: nn.Module, lengths: Sequence[int] = (64, 64)) -> torch.Tensor:
    """A loss of several forwards of one model, which one backward differentiates."""
    torch.manual_seed(5)
    losses = [model(*tokens(length)) for length in lengths]
    loss = -torch.nn.functional.logsigmoid(losses[0] - sum(losses[1:]))
    loss.backward()
    return loss.detach()


def asked_for(budget: int, calls: int, lengths: Sequence[int], options: dict[str, Any]) -> int:  # noqa: F811
    """The least budget that is named where ``budget`` is refused."""
    with streamed(CASE, ts.Budget(budget, calls=calls), **options) as model:
        sgd(model)
        with pytest.raises(BudgetError) as told:
            preferences(model, lengths)
    assert told.value.least_nbytes is not None
    return told.value.least_nbytes


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of a block takes the same time: of plans that fit, the fastest is taken, and one measured otherwise may
    leave less to the next call than that for which the least budget was named."""
    clock = itertools.count()
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock) / 1000)


@pytest.mark.thinned(6)
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "lengths",
    [(64, 64), pytest.param((64, 64, 64), marks=pytest.mark.full), pytest.param(LENGTHS, marks=pytest.mark.full)],
)
def test_the_least_budget_for_several_calls_holds_them(lengths: tuple[int, ...], options: dict[str, Any]) -> None:  # noqa: F811
    """It is named by the first of them, before anything was run in vain, and is less than what they need if each takes
    what there is."""
    alike, least = len(set(lengths)) == 1, asked_for(1, len(lengths), lengths, options)
    while not alike:  # the first one knows of calls like itself
        try:
            before, least = least, asked_for(least, len(lengths), lengths, options)
        except pytest.fail.Exception:
            break
        assert least > before
    plain = CASE.model()
    loss = preferences(plain, lengths)
    for slack in (1.0, 1.1, 1.5):
        budget = int(slack * least)
        with streamed(CASE, ts.Budget(budget, calls=len(lengths)), **options) as model:
            sgd(model)
            assert torch.equal(preferences(model, lengths), loss)
            assert_same(gradients_of(plain), gradients_of(model))
            assert peak_nbytes(model, partial(preferences, model, lengths)) <= 1.05 * budget
    assert not alike or asked_for(least, 1, lengths, options) > least


def test_the_refusal_says_how_to_share(options: dict[str, Any]) -> None:  # noqa: F811
    budget = asked_for(1, 2, (64, 64), options)
    with streamed(CASE, budget, **options) as model:
        sgd(model)
        with pytest.raises(BudgetError, match=rf"Budget\({budget}, calls=2\)"):
            preferences(model)
    with streamed(CASE, ts.Budget(budget, calls=2), **options) as model:
        sgd(model)
        preferences(model)


def test_micro_batches_of_two_calls_each(tmp_path: Path) -> None:
    options = {"folder": tmp_path, "engine": "auto"}  # noqa: F811
    budget = ts.Budget(int(1.1 * asked_for(1, 2, (64, 64), options)), calls=2)
    plain = CASE.model()
    with streamed(CASE, budget, **options) as model:
        optimizer, other = sgd(model), torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            for _ in range(2):
                preferences(plain)
                preferences(model)
            assert_same(gradients_of(plain), gradients_of(model))
            for one in (optimizer, other):
                one.step()
                one.zero_grad()


def test_a_single_call_may_have_all_of_it_where_that_leaves_the_others_room(options: dict[str, Any]) -> None:  # noqa: F811
    with streamed(CASE, ts.Budget("1 TiB", calls=2), **options) as model:
        sgd(model)
        preferences(model)
        assert ts.report(model).plan.simulation.forwards == 6


# -- chains, loops and programs: nothing is shared, each call has its part -------------------------------------------

X = torch.linspace(-1, 1, 64 * 64).view(64, 64)
STAGES = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]


def chain(budget: ts.Budget) -> Callable[[torch.Tensor], torch.Tensor]:
    return ts.Chain(STAGES, budget=budget)


def program(budget: ts.Budget) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        for stage in STAGES:
            x = stage(x)
        return x

    return ts.Program(function, budget=budget)


def loop(budget: ts.Budget) -> Callable[[torch.Tensor], torch.Tensor]:
    run = ts.Loop(STAGES[0], budget=budget)
    return lambda x: run(x, steps=12)  # type: ignore[no-any-return]


def plain(x: torch.Tensor, make: object) -> torch.Tensor:
    for stage in [STAGES[0]] * 12 if make is loop else STAGES:
        x = stage(x)
    return x


@pytest.mark.parametrize("make", [chain, loop, program])
def test_several_calls_of_other_front_ends(make: Callable[[ts.Budget], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    kib = 2**10
    run, calls = make(ts.Budget(10 * kib, calls=3)), 3
    inputs = [(X * (k + 1)).requires_grad_() for k in range(calls)]

    def gradients(f: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum(f(x).square().sum() for x in inputs), inputs)  # type: ignore[arg-type]

    with pytest.raises(BudgetError, match="is for 3 calls at once") as told:
        run(inputs[0]).sum().backward()
    least = told.value.least_nbytes
    assert least is not None
    assert least > 3 * 2 * X.nbytes
    for slack in (1.0, 1.2):
        run = make(ts.Budget(int(slack * least) + 16 * kib, calls=3))
        expected = gradients(lambda x: plain(x, make))
        for _ in range(3):
            found = gradients(run)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    alone = make(ts.Budget(int(1.2 * least)))
    with pytest.raises(BudgetError):
        gradients(alone)


def test_what_cannot_be_a_number_of_calls() -> None:
    for calls in (0, -1, 1.5, True, "2"):
        with pytest.raises(InputError, match="calls="):
            ts.Budget("1 GiB", calls=calls)  # type: ignore[arg-type]
    assert ts.Budget("1 GiB", calls=2) == ts.Budget(2**30, calls=2) != ts.Budget(2**30)
    assert repr(ts.Budget("1 GiB", calls=2)) == "Budget(device=1.00 GiB, calls=2)"


class Counting:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def waiting(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int) -> torch.Tensor:
    """The loss of calls that all await one backward, which follows."""
    loss = torch.stack([run(x) for _ in range(count)]).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("budget", ["1GiB", ts.Budget("1GiB", calls=20)], ids=["whole", "shared"])
@pytest.mark.parametrize("name", ["chain", "join", "loop"])
def test_calls_that_wait_are_neither_measured_nor_planned_anew(
    name: str, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first call's plan takes fits beside those that wait: it serves them all."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    measured, planned = Counting(chains.profile_stages), Counting(chains.plan_with)
    chosen = Counting(loops.choose)
    monkeypatch.setattr(chains, "profile_stages", measured)
    monkeypatch.setattr(chains, "plan_with", planned)
    monkeypatch.setattr(loops, "choose", chosen)
    made: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
        "chain": lambda: ts.Chain(list(net), budget=budget),
        "join": lambda: ts.Join([list(net)], nn.Identity(), budget=budget),
        "loop": lambda: partial(ts.Loop(net, budget=budget), steps=3),
    }
    plains: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"loop": lambda x: net(net(net(x)))}
    run, x = made[name](), torch.randn(2, 8)
    run(x).sum().backward()
    first = measured.calls, planned.calls, chosen.calls
    assert sum(first) > 0
    net.zero_grad(set_to_none=False)
    loss = waiting(run, x, 20)
    found = [p.grad.clone() for p in net.parameters()]
    assert (measured.calls, planned.calls, chosen.calls) == first
    net.zero_grad(set_to_none=False)
    assert torch.equal(loss, waiting(plains.get(name, net), x, 20))
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(net.parameters(), found, strict=True))


def test_with_less_room_a_call_is_planned_anew_and_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once there is room again, the plan made with it serves."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    x = torch.randn(64, 64)
    all_nbytes = ts.Chain(list(net), budget="1GiB")
    all_nbytes(x).sum().backward()
    assert all_nbytes.plan is not None
    everything = all_nbytes.plan.peak_nbytes
    measured = Counting(chains.profile_stages)
    monkeypatch.setattr(chains, "profile_stages", measured)
    run = ts.Chain(list(net), budget=int(1.6 * everything))
    held = [run(x)]
    ample = run.plan
    held.append(run(x))
    tight = run.plan
    assert ample is not None
    assert tight is not None
    assert tight.peak_nbytes <= int(1.6 * everything) - ample.peak_nbytes < ample.peak_nbytes
    torch.stack(held).sum().backward()
    held.clear()
    run(x)
    assert run.plan is ample
    assert measured.calls == 1
