"""Every way to reach a thing, by what is there, by front end: exact, or refused by name; never silently different."""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import reaching
import torch
from reaching import EXACT, THINGS, WAYS, WIDTH, Block, Network, left_in
from torch.utils.checkpoint import checkpoint

import tapestream as ts
from tapestream.errors import BudgetError, TapestreamError

STAGES, TURNS = 6, 2
Run = Callable[[torch.Tensor], torch.Tensor]


def steps_of(way: str, thing: str, count: int) -> tuple[list[Any], list[Any]]:
    """Things, and steps that use them."""
    make, use = THINGS[thing]
    torch.manual_seed(1)
    things = [make() for _ in range(count)]
    return things, [WAYS[way](use, one) for one in things]


def trained(run: Run, things: list[Any], model: Any = None) -> list[Any]:
    """Losses, gradients and what is left."""
    x, found = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_(), list[Any]()
    for _ in range(TURNS):
        loss = run(x).square().mean()
        loss.backward()
        found.append(loss.detach())
    own = [] if model is None else [p.grad.clone() for p in model.parameters()]
    return [*found, x.grad, *own, *(one for thing in things for one in left_in(thing))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def in_turn(steps: list[Any]) -> Run:
    def run(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x

    return run


def chain(way: str, thing: str, budget: int | None) -> list[Any]:
    things, steps = steps_of(way, thing, STAGES)
    return trained(in_turn(steps) if budget is None else ts.Chain(steps, budget=budget), things)


def loop(way: str, thing: str, budget: int | None) -> list[Any]:
    things, steps = steps_of(way, thing, 1)
    if budget is None:
        return trained(in_turn(steps * STAGES), things)
    looped = ts.Loop(steps[0], budget=budget)
    return trained(lambda x: looped(x, steps=STAGES), things)


def program(way: str, thing: str, budget: int | None) -> list[Any]:
    things, steps = steps_of(way, thing, STAGES)
    return trained(in_turn(steps) if budget is None else ts.Program(in_turn(steps), budget=budget), things)


def stream(way: str, thing: str, budget: int | None) -> list[Any]:
    things, steps = steps_of(way, thing, STAGES)
    torch.manual_seed(2)
    model = Network([Block(step) for step in steps])
    if budget is None:
        return trained(model, things, model)
    ts.stream(model, device="cpu", budget=budget, home="device")
    return trained(model, things, model)


FRONTS = {"Chain": chain, "Loop": loop, "Program": program, "stream": stream}


def outcome(front: str, way: str, thing: str) -> str:
    """Of a run at the least budget, beside plain PyTorch's: exact, refused, WRONG or RAW."""
    run = FRONTS[front]
    wanted = run(way, thing, None)
    reaching.KEPT.clear()
    budget, got = 1, list[Any]()
    while not got:
        try:
            got = run(way, thing, budget)
        except BudgetError as error:
            budget = max(budget + 1, error.least_nbytes or 0)
        except TapestreamError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"RAW: {type(error).__name__}: {error}"
    differing = [k for k, pair in enumerate(zip(wanted, got, strict=True)) if not same(*pair)]
    return f"WRONG: {len(differing)} of {len(wanted)}: {differing}" if differing else "exact"


def check(front: str, thing: str, ways: Iterable[str]) -> None:
    found = {way: outcome(front, way, thing) for way in ways}
    allowed = "exact" if thing in EXACT else ("exact", "refused")
    assert {way: said for way, said in found.items() if not said.startswith(allowed)} == {}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("front", ["Chain", "Loop"])
def test_every_way_to_reach_a_thing(front: str, thing: str) -> None:
    check(front, thing, WAYS)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("front", ["Program", "stream"])
def test_some_ways(front: str, thing: str) -> None:
    """These do not differ in what they see, and take longer."""
    check(front, thing, ["bound_method", "thread_local"])


@pytest.mark.full
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("front", ["Program", "stream"])
def test_all_ways(front: str, thing: str) -> None:
    check(front, thing, WAYS)


def test_a_value_that_a_step_leaves_for_the_next_is_refused_where_a_gradient_flows() -> None:
    """Also where nothing shows it in the first steps' numbers."""
    decay, held = torch.tensor(0.9, requires_grad=True), reaching.Box(torch.zeros(WIDTH))

    def step(x: torch.Tensor) -> torch.Tensor:
        held.value = decay * held.value + torch.sigmoid(x)
        return x + (held.value > 1e9).float() * held.value

    with pytest.raises(TapestreamError, match=r"earlier step has left|with each run"):
        ts.Loop(step, budget="1MiB")(torch.zeros(2, WIDTH), steps=5)


@pytest.mark.parametrize("front", ["Chain", "Loop"])
@pytest.mark.parametrize("needs", [True, False])
def test_reentrant_checkpoints_inside(front: str, needs: bool) -> None:
    """Which plain PyTorch gives no gradient where none of their inputs has one."""
    weights = [torch.linspace(-1, 1, WIDTH).requires_grad_() for _ in range(STAGES)]

    def of(weight: torch.Tensor) -> reaching.Step:
        return lambda x: checkpoint(lambda z: torch.tanh(z * weight), x, use_reentrant=True) + weight

    def found(budget: int | None) -> list[torch.Tensor | None]:
        for weight in weights:
            weight.grad = None
        steps = [of(weight) for weight in weights] if front == "Chain" else [of(weights[0])] * STAGES
        x = torch.ones(4, WIDTH, requires_grad=needs)
        run = in_turn(steps)
        if budget is not None and front == "Chain":
            run = ts.Chain(steps, budget=budget)
        elif budget is not None:
            run = lambda x: ts.Loop(steps[0], budget=budget)(x, steps=STAGES)  # noqa: E731
        run(x).square().sum().backward()
        return [x.grad, *(weight.grad for weight in weights)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that no input has a gradient
        wanted = found(None)
        with pytest.raises(BudgetError) as least:
            found(1)
        for budget in (least.value.least_nbytes, 2**20):
            for ours, plain in zip(found(budget), wanted, strict=True):
                if ours is None or plain is None or front == "Chain":
                    assert same(ours, plain)
                else:  # of a weight that several steps use, plain PyTorch adds what is inside at once
                    torch.testing.assert_close(ours, plain)


class Reads(torch.nn.Module):
    """Of a container that the model fills before each block."""

    now: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        if own:
            self.now = {"scale": 1.0}

    def scale(self) -> float:
        return self.now["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale()


@pytest.mark.parametrize("own", [True, False])
def test_a_value_that_others_leave_for_a_block_is_guarded(own: bool) -> None:
    """Of the class or of the module itself, by way of a method."""
    blocks = [Reads(own) for _ in range(6)]
    Reads.now["scale"] = 1.0
    chain = ts.Chain(blocks, budget=3000, planner="revolve", slots=1)
    x = torch.ones(8, WIDTH, requires_grad=True)
    chain(x).sum().backward()
    loss = chain(x).sum()
    (blocks[2].now if own else Reads.now)["scale"] = 2.0
    with pytest.raises(TapestreamError, match="changed between the call and its backward"):
        loss.backward()


@pytest.mark.parametrize("front", ["Chain", "Loop"])
def test_buffers_of_modules_that_only_a_run_shows_are_guarded(front: str) -> None:
    """They are not to change between a call and its backward."""
    norms = [torch.nn.BatchNorm1d(WIDTH).eval() for _ in range(STAGES)]
    steps = [WAYS["thread_local"](lambda x, it: torch.sin(it(x)), norm) for norm in norms]
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()

    def called(budget: int) -> torch.Tensor:
        if front == "Chain":
            return ts.Chain(steps, budget=budget, planner="revolve", slots=1)(x)
        return ts.Loop(steps[0], budget=budget, planner="revolve", slots=1)(x, steps=STAGES)

    loss = called(2**20).sum()
    assert norms[0].running_mean is not None
    norms[0].running_mean.add_(1)
    with pytest.raises(TapestreamError, match="changed between the call and its backward"):
        loss.backward()


@pytest.mark.parametrize("front", ["Chain", "Loop", "stream"])
def test_modules_that_each_run_makes_itself(front: str) -> None:
    """They are others each time, and nobody holds them."""
    made = list["weakref.ref[torch.nn.Module]"]()

    def use(x: torch.Tensor, _: object) -> torch.Tensor:
        norm = torch.nn.BatchNorm1d(WIDTH, affine=False)
        if not ts.recomputing():
            made.append(weakref.ref(norm))
        return torch.tanh(norm(x)) + x

    def run(budget: int | None) -> list[object]:
        torch.manual_seed(0)
        steps = [WAYS["closure"](use, None) for _ in range(STAGES if front != "Loop" else 1)]
        model: object = None
        if front == "stream":
            model = Network([Block(step) for step in steps])
            called: object = model if budget is None else ts.stream(model, device="cpu", budget=budget, home="device")
        elif budget is None:
            called = in_turn(steps * (STAGES if front == "Loop" else 1))
        elif front == "Loop":
            called = lambda x: ts.Loop(steps[0], budget=budget)(x, steps=STAGES)  # noqa: E731
        else:
            called = ts.Chain(steps, budget=budget)
        return trained(called, [], model)  # type: ignore[arg-type]

    assert all(same(*pair) for pair in zip(run(2**20), run(None), strict=True))
    gc.collect()
    assert not any(one() for one in made)
