"""Runs whose length is known when they have ended."""

import pytest
import torch
from looping import Ticks, same, seeded

import tapestream as ts
from tapestream.errors import InputError
from tapestream.planners._recurrences import least_forwards


def newton(weight):
    """An iteration with a parameter, and its number of steps as part of the state."""

    def step(state):
        x, t = state
        return x - 0.05 * (torch.tanh(x) * weight + 0.1 * x**3 - 0.3), t + 1

    return step


def ends_at(length):
    return lambda state: state[1] >= length


@pytest.mark.parametrize("length", [1, 2, 17, 64, 150])
@pytest.mark.parametrize(
    "options",
    [
        {"slots": 3, "planner": "online"},
        {"slots": 5, "planner": "online", "rule": "stumm_walther_2"},
        {"slots": 4, "planner": "online", "chunk": 7},
        {"budget": "100KiB"},
        {},
    ],
    ids=str,
)
def test_equal_to_a_while_loop(options, length):
    def program(loop):
        seeded()
        weight, x = torch.randn(3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        step, state = newton(weight), (x, 0)
        if loop:
            state = ts.Loop(step, **options)(state, until=ends_at(length), max_steps=1000)
        else:
            while not ends_at(length)(state):
                state = step(state)
        assert state[1] == length
        (state[0] * torch.arange(3.0)).sum().backward()
        return state[0], x.grad, weight.grad

    assert all(map(same, program(True), program(False)))


@pytest.mark.parametrize("length", [5, 40, 200])
@pytest.mark.parametrize("rule", ["wang_moin", "stumm_walther_1", "stumm_walther_2"])
def test_steps_executed_are_those_of_the_scheme_and_near_the_offline_optimum(rule, length):
    ticks, weight = Ticks(), torch.randn(3, requires_grad=True)
    step = newton(weight)

    def counted(state):
        ticks.tick()
        return step(state)

    slots = 4
    run = ts.Loop(counted, planner="online", slots=slots, rule=rule)
    x, _ = run((torch.ones(3), 0), until=ends_at(length))
    before = ticks.number - length  # those that watched and measured
    x.sum().backward()
    calls = ticks.number - before
    offline = length + least_forwards(length, slots)
    assert offline <= calls <= 2 * offline + length


def test_outputs_and_inputs_of_a_run_of_unknown_length():
    def program(loop):
        seeded()
        weight, rows = torch.randn(3, requires_grad=True), torch.randn(50, 3, requires_grad=True)

        def step(state, x):
            h = torch.tanh(state["h"] * weight + x)
            return {"h": h, "far": state["far"] + h.detach().abs().sum()}, h

        state = {"h": torch.zeros(3), "far": torch.zeros(())}
        over = lambda found: found["far"] > 20  # noqa: E731
        if loop:
            state, out = ts.Loop(step, planner="online", slots=3)(state, inputs=rows, outputs="stack", until=over)
        else:
            found = []
            while not over(state):
                state, y = step(state, rows[len(found)])
                found.append(y)
            out = torch.stack(found)
        (out * torch.arange(3.0)).sum().backward()
        return out, weight.grad, rows.grad

    ours, theirs = program(True), program(False)
    assert ours[0].shape[0] < 50
    assert all(map(same, ours, theirs))


def test_a_condition_that_holds_at_once_makes_no_step():
    state = torch.ones(2, requires_grad=True)
    assert ts.Loop(lambda h: h + 1)(state, until=lambda h: h.sum() < 3) is state


@pytest.mark.parametrize("grad", [True, False])
def test_refusals(grad):
    weight = torch.ones(2, requires_grad=True)
    run = ts.Loop(lambda h: h * weight)
    with torch.set_grad_enabled(grad):
        with pytest.raises(InputError, match=r"after 7 steps.*still not fulfilled"):
            run(torch.ones(2), until=lambda h: h.sum() > 10, max_steps=7)
        with pytest.raises(InputError, match=r"shape \(2,\).*\.all\(\)"):
            run(torch.ones(2), until=lambda h: h > 10)
        with pytest.raises(InputError, match="were both given"):
            run(torch.ones(2), steps=3, until=lambda h: h.sum() > 10)
        with pytest.raises(InputError, match="max_steps"):
            run(torch.ones(2), steps=3, max_steps=3)
    with pytest.raises(InputError, match="'online'"):
        ts.Loop(lambda h: h * weight, planner="revolve")(torch.ones(2), until=lambda h: h.sum() > 10)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("known", [True, False])
def test_no_step_is_run_past_the_end(length, known):
    """Neither to watch steps nor to measure them: a table that the step reads may end there."""
    factors = torch.linspace(0.5, 1.5, length, requires_grad=True)
    rows = [factors[t] for t in range(length)]

    def step(state):
        h, t = state
        return torch.sin(h * rows[t]), t + 1

    how = {"steps": length} if known else {"until": ends_at(length)}
    h, t = ts.Loop(step)((torch.ones(2), 0), **how)
    assert t == length
    h.sum().backward()
    expected = torch.ones(2)
    for row in rows:
        expected = torch.sin(expected * row)
    (wanted,) = torch.autograd.grad(expected.sum(), factors)
    assert same(factors.grad, wanted)
