"""Counts, long loops, budgets, hooks and flags of a Loop, and what it refuses."""

import collections
import copy
import gc
import math
import os
import re
import weakref
from itertools import pairwise

import numpy
import pytest
import torch
from looping import Ticks, captured, differentiated, dropout_module, lstm_cell, same, seeded, tanh_rnn
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.planners._recurrences import least_forwards


@pytest.mark.parametrize(("steps", "slots"), [(1, 1), (10, 2), (10, 3), (100, 5), (137, 9)])
def test_executed_steps_are_those_of_revolve(steps, slots):
    ticks, weight = Ticks(), torch.ones(3, requires_grad=True)

    def step(h):
        ticks.tick()
        return torch.sin(h * weight)

    run = ts.Loop(step, planner="revolve", slots=slots)
    run(torch.ones(3), steps=steps).sum().backward()
    assert run.plan.simulation.forwards == steps + least_forwards(steps, slots)
    again = run(torch.ones(3), steps=steps)
    before = ticks.number - (steps - 1)  # all but the last forward, which is recorded, and what watching took
    again.sum().backward()
    assert ticks.number - before + 1 == steps + least_forwards(steps, slots)


def sine(h, weight):
    return torch.sin(h * weight)


def differentiated_inside(h, weight):
    with torch.enable_grad():
        x = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad(x.square().sum(), x)
    return torch.sin(h * weight) + 0.1 * slope


class Leaving(nn.Module):
    def forward(self, h, weight):
        self.last = (2 * h).detach()
        return torch.sin(h * weight)


def handed_on(state, weight):
    return [torch.sin(state[0] * weight), *(a + b for a, b in pairwise(state))]


@pytest.mark.parametrize(
    ("function", "state", "steps", "options", "looked", "measured"),
    [
        (sine, torch.ones(3), 1, {}, 2, 6),
        (sine, torch.ones(3), 2, {}, 4, 6),
        (sine, torch.ones(3), 4, {}, 4, 16),
        (sine, torch.ones(3), 100, {}, 4, 20),
        (sine, torch.ones(3), 20, {"verify": True}, 5, 20),
        (sine, torch.ones(400_000, 3), 9, {}, 4, 14),
        (differentiated_inside, torch.ones(3), 20, {}, 3, 21),
        (Leaving(), torch.ones(3), 20, {}, 5, 20),
        (handed_on, [torch.ones(3)] * 2, 20, {}, 4, 20),
        (handed_on, [torch.ones(3)] * 4, 20, {}, 6, 20),
    ],
)
def test_evaluations_are_those_that_the_page_says(function, state, steps, options, looked, measured, tmp_path):
    """docs/loops.md: n + P(n, s), the look of each call, what the first one measures, and nothing else. A file has a
    mark for each, where nobody looks for what a step changes."""
    weight, slots = torch.full((3,), 0.5, requires_grad=True), 3
    with (tmp_path / "marks").open("wb", buffering=0) as file:

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.function = function

            def forward(self, h):
                os.write(handle, b".")
                return self.function(h, weight)

        handle, step = file.fileno(), Step()
        run = ts.Loop(step, planner="revolve", slots=slots, **options)
        for more in (looked + measured, looked, looked):
            before = os.fstat(handle).st_size
            out = run(state, steps=steps)
            sum(one.sum() for one in (out if isinstance(out, list) else [out])).backward()
            found = os.fstat(handle).st_size - before
            assert found == steps + least_forwards(steps, slots) + more


def test_recomputing_is_said():
    said = []
    weight = torch.ones(2, requires_grad=True)

    def step(h, t):
        if not ts.recomputing():
            said.append(t)
        return h * weight

    ts.Loop(step, planner="revolve", slots=2)(torch.ones(2), inputs=range(9)).sum().backward()
    assert said == list(range(9))


def linear(n, dtype=torch.float64, **options):
    """x -> a x + b in closed form: value, and derivatives by a, b and the start."""
    a = torch.tensor([1 - 1e-6, 1 - 3e-6], dtype=dtype, requires_grad=True)
    b = torch.tensor([1e-6, -2e-6], dtype=dtype, requires_grad=True)
    x = torch.tensor([0.3, 0.7], dtype=dtype, requires_grad=True)
    run = ts.Loop(lambda h: a * h + b, **options)
    out = run(x, steps=n)
    out.sum().backward()
    with torch.no_grad():
        power, one_less = a**n, 1 - a
        total = (1 - power) / one_less
        slope = (total - n * a ** (n - 1)) / one_less
        expected = power * x + b * total, n * a ** (n - 1) * x + b * slope, total, power
    for found, wanted in zip((out, a.grad, b.grad, x.grad), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    return run


def test_a_linear_recurrence_over_many_steps():
    run = linear(20_000, budget="256KiB")
    assert run.plan.peak_nbytes <= 256 * 1024


@pytest.mark.full
def test_a_linear_recurrence_over_a_million_steps():
    linear(1_000_000, budget="1MiB")


LONG = pytest.param(300_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("steps", [3000, LONG])
def test_taylor(steps):
    """The remainder of the first order falls with the square of the step."""
    seeded()
    weight = (0.2 * torch.randn(4, 4, dtype=torch.float64)).requires_grad_()
    start, way = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    force = torch.randn(2, 4, dtype=torch.float64)  # without it nothing would be left after so many steps

    def loss(w):
        run = ts.Loop(lambda h: torch.sin(h @ w + force) + 0.5 * h, planner="revolve", slots=40, chunk=3)
        return (run(start, steps=steps) ** 2).sum()

    value = loss(weight)
    value.backward()
    slope = (weight.grad * way).sum()
    rests = [float((loss(weight.detach() + h * way) - value - h * slope).detach()) for h in (4e-4, 2e-4, 1e-4)]
    rates = [abs(a / b) for a, b in pairwise(rests)]
    assert all(3.5 < rate < 4.5 for rate in rates), rests


@pytest.mark.parametrize("steps", [1000, LONG])
def test_finite_differences(steps):
    """A forced pendulum with friction."""
    pull = torch.tensor([0.8, 0.3], dtype=torch.float64, requires_grad=True)

    def loss(pull):
        def step(state, t):
            x, v = state
            v = v + 0.01 * (pull[1] * math.cos(0.01 * t) - pull[0] * torch.sin(x) - 0.2 * v)
            return x + 0.01 * v, v

        start = torch.full((), 0.5, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        return ts.Loop(step, planner="revolve", slots=40, chunk=10)(start, inputs=range(steps))[0]

    (found,) = torch.autograd.grad(loss(pull), pull)
    with torch.no_grad():
        ways = 1e-5 * torch.eye(2, dtype=torch.float64)
        wanted = torch.stack([(loss(pull + way) - loss(pull - way)) / 2e-5 for way in ways])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_more_slots_never_take_more_steps():
    weight = torch.ones(3, requires_grad=True)
    forwards = []
    for slots in range(1, 14):
        run = ts.Loop(lambda h: torch.sin(h * weight), planner="revolve", slots=slots)
        run(torch.ones(3), steps=60).sum().backward()
        forwards.append(run.plan.simulation.forwards)
    assert forwards == sorted(forwards, reverse=True)
    assert forwards[0] > forwards[-1]


def test_memory_does_not_grow_with_the_number_of_steps():
    weight = torch.eye(4, requires_grad=True)
    peaks = []
    for steps in (300, 300, 3000):
        run = ts.Loop(lambda h: torch.tanh(h @ weight), planner="revolve", slots=5)
        start = torch.ones(64, 4, requires_grad=True)
        run(start, steps=steps)  # plans; what it holds goes at once
        with ts.track_memory() as meter:
            run(start, steps=steps).sum().backward()
        peaks.append(meter.peak_nbytes)
    assert peaks[2] <= peaks[1] + 1024


def test_a_dropped_result_gives_its_budget_and_its_memory_back_at_once():
    seeded()
    step, h, _ = tanh_rnn()
    run = ts.Loop(step, budget="100KiB")
    waiting = run(h, steps=2000)
    assert run._live_nbytes > 0
    driver = weakref.ref(waiting.grad_fn.call.engine)
    gc.collect()  # which is not due again so soon
    del waiting
    assert driver() is None
    assert run._live_nbytes == 0
    run(h, steps=2000).sum().backward()
    assert run._live_nbytes == 0


def test_a_plan_serves_another_process():
    expected, run = differentiated(lstm_cell, 40, {"budget": "60KiB"})
    found, other = differentiated(lstm_cell, 40, {"plan": run.plan})
    assert all(map(same, found.gradients, expected.gradients))
    assert other.plan.schedule == run.plan.schedule
    with pytest.raises(InputError, match="plan="):
        differentiated(lstm_cell, 3, {"plan": run.plan})


def test_without_gradients_it_is_a_plain_loop():
    seeded()
    step, h, _ = lstm_cell()
    run = ts.Loop(step, budget="1KiB")  # would be too little for a gradient
    with torch.no_grad():
        found = run(h, steps=9)
        expected = h
        for _ in range(9):
            expected = step(expected)
    assert same(found[0], expected[0])
    assert run(torch.ones(3), steps=0).sum() == 3


def test_a_module_that_trains_and_copies():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    run = ts.Loop(net, planner="revolve", slots=3)
    assert [id(p) for p in run.parameters()] == [id(p) for p in net.parameters()]
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (run(torch.ones(2, 3), steps=20) - 0.3).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    copied = copy.deepcopy(run)
    assert same(copied(torch.ones(2, 3), steps=20), run(torch.ones(2, 3), steps=20))


def test_hooks_on_parameters_see_the_sum_once():
    weight = torch.ones(3, requires_grad=True)
    seen = []
    weight.register_hook(lambda g: seen.append(g.clone()))
    ts.Loop(lambda h: torch.sin(h * weight), planner="revolve", slots=3)(torch.ones(3), steps=10).sum().backward()
    assert len(seen) == 1
    assert same(seen[0], weight.grad)


@pytest.mark.parametrize("kind", [tanh_rnn, dropout_module, captured])
def test_autocast(kind):
    def in_float():
        step, state, leaves = kind()
        return lambda h: step(h).float(), state, leaves

    options = [None, {"planner": "revolve", "slots": 3}, {"planner": "revolve", "slots": 3, "chunk": 4}]
    with torch.autocast("cpu", torch.bfloat16):
        expected, *found = [differentiated(in_float, 12, one)[0] for one in options]
    for one in found:
        assert [same(a, b) for a, b in zip(one.gradients, expected.gradients, strict=True)] == [True] * len(
            expected.gradients
        )


def test_progress():
    told = []
    run = ts.Loop(tanh_rnn()[0], planner="revolve", slots=4, progress=lambda *what: told.append(what))
    run(torch.ones(3, 6, requires_grad=True), steps=50).sum().backward()
    done, of, left = told[-1]
    assert done == of == run.plan.simulation.forwards
    assert left == 0


# -- bad input ------------------------------------------------------------------------------------------------------

WEIGHT = torch.ones(2, requires_grad=True)


def grows(h, t):
    return {"u": torch.cat((h["u"], h["u"])) if t == 5 else h["u"] * WEIGHT, "v": h["v"]}


def casts(h, t):
    return {"u": h["u"] * WEIGHT, "v": h["v"].double() if t == 5 else h["v"]}


def renames(h, t):
    return {"u": h["u"] * WEIGHT, ("w" if t == 5 else "v"): h["v"]}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (grows, r"step 5 returned state\['u'\] = \(4,\) float32 instead of \(2,\) float32"),
        (casts, r"step 5 returned state\['v'\] = \(2,\) float64 instead of \(2,\) float32"),
        (renames, r"step 5 returned the structure \{'u': \*, 'w': \*\} instead of \{'u': \*, 'v': \*\}"),
    ],
)
def test_a_changed_state_is_named(step, message, grad):
    with torch.set_grad_enabled(grad), pytest.raises(InputError, match=message):
        ts.Loop(step, planner="revolve", slots=2)({"u": torch.ones(2), "v": torch.ones(2)}, inputs=range(9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps must be a whole number of at least 0, not -1"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"steps": True}, "steps must be a whole number"),
        ({}, "give steps="),
        ({"steps": 9, "inputs": torch.ones(8, 2)}, "9 steps were asked for, but inputs= has 8 rows"),
        ({"inputs": "rows"}, "found str"),
        ({"inputs": {"a": torch.ones(3, 2), "b": torch.ones(4, 2)}}, re.escape("lengths [3, 4]")),
        ({"steps": 3, "outputs": "mean"}, "'stack', 'sum' or a function"),
        ({"steps": 3, "outputs": "stack"}, r"must return \(state, output\); it returned Tensor"),
        ({"steps": 3, "every": 2}, "give outputs= too"),
        ({"steps": 3, "outputs": "sum", "every": 0}, "every= is a whole number"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    step = (lambda h, x: h * WEIGHT) if "inputs" in arguments else (lambda h: h * WEIGHT)
    with pytest.raises(InputError, match=message):
        ts.Loop(step)(torch.ones(2), **arguments)


def test_bad_states_and_options():
    run = ts.Loop(lambda h: h * WEIGHT)
    with pytest.raises(InputError, match="holds no tensor"):
        run({"a": 1}, steps=3)
    with pytest.raises(InputError, match="several devices"):
        ts.Loop(lambda h: h)([torch.ones(2), torch.ones(2, device="meta")], steps=3)
    with pytest.raises(InputError, match="chunk"):
        ts.Loop(lambda h: h, chunk=0)
    with pytest.raises(InputError, match="found int"):
        ts.Loop(3)
    with pytest.raises(InputError, match="no planner 'revolvee'"):
        ts.Loop(lambda h: h * WEIGHT, planner="revolvee")(torch.ones(2), steps=3)
    with pytest.raises(BudgetError, match=r"a budget of 1\.00 KiB.*are needed") as refused:
        ts.Loop(lambda h: h * WEIGHT, budget="1KiB")(torch.ones(2), steps=300)
    ts.Loop(lambda h: h * WEIGHT, budget=refused.value.least_nbytes)(torch.ones(2), steps=300).sum().backward()


@pytest.mark.parametrize("steps", [1, 2, 3, 300, 100_000])
def test_a_refusal_says_what_fills_the_least_budget(steps: int) -> None:
    with pytest.raises(BudgetError) as refused:
        ts.Loop(lambda h: torch.tanh(h * WEIGHT.sum()).exp(), budget="1KiB")(torch.ones(2000), steps=steps)
    least = refused.value.budgets[0]
    assert sum(nbytes for _, nbytes in least.fills) == least.nbytes
    assert "states" in dict(least.fills)
    assert "bytes are filled by" in str(refused.value)


def test_a_step_that_is_not_deterministic():
    def step(state):
        generator = torch.Generator()
        generator.seed()
        return {"h": state["h"] * WEIGHT, "noise": torch.randn(2, generator=generator)}

    with pytest.raises(GradientError, match=r"not deterministic.*state\['noise'\]"):
        ts.Loop(step, verify=True)({"h": torch.ones(2), "noise": torch.ones(2)}, steps=5)
    ts.Loop(dropout_module()[0], verify=True)(torch.ones(4, 6), steps=5).sum().backward()


def test_what_would_be_wrong_raises():
    weight = torch.ones(2, requires_grad=True)
    run = ts.Loop(lambda h: torch.sin(h * weight), planner="revolve", slots=2)
    out = run(torch.ones(2), steps=9)
    out.sum().backward()
    with pytest.raises(GradientError, match="second time"):
        out.sum().backward()
    out = run(torch.ones(2), steps=9)
    with pytest.raises(GradientError, match="create_graph"):
        torch.autograd.grad(out.sum(), weight, create_graph=True)
    out = run(torch.ones(2), steps=9)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(GradientError, match="modified by an in-place operation"):
        out.sum().backward()


def test_a_tensor_hidden_from_the_first_steps_is_refused():
    hidden = numpy.array([None])
    hidden[0] = torch.ones(2, requires_grad=True)

    def step(h, t):
        return torch.sin(h * WEIGHT) * (hidden[0] + 1 if t == 6 else 1)

    with pytest.raises(InputError, match="neither used in its first steps nor holds"):
        ts.Loop(step, planner="revolve", slots=2)(torch.ones(2), inputs=range(9)).sum().backward()


def test_named_tuples_of_another_class_with_the_same_name_are_told():
    one, other = (collections.namedtuple("Pair", ["u", "v"]) for _ in range(2))
    with pytest.raises(InputError, match="of other classes with the same names"):
        ts.Loop(lambda h: other(h.u * WEIGHT, h.v), budget="1MiB")(one(torch.ones(2), torch.ones(2)), 4)
