"""Gradients that reach states and outputs only through `inputs=`, or begin after the first steps."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import tapestream as ts
from tapestream.errors import GradientError

STEPS = 14
OPTIONS = [{"planner": "revolve", "slots": 1}, {"planner": "revolve", "slots": 3, "chunk": 4}, {"budget": "1MiB"}]


@dataclasses.dataclass
class Pair:
    h: torch.Tensor
    c: torch.Tensor


pytree.register_dataclass(Pair)
FORMS = {
    "tuple": (lambda h, c: (h, c), lambda s: s),
    "dict": (lambda h, c: {"h": h, "c": c}, lambda s: (s["h"], s["c"])),
    "dataclass": (Pair, lambda s: (s.h, s.c)),
}


def gate(h, c, f, t, weight):
    """The output is made of the input alone."""
    return h + 1, c, torch.sigmoid(f) * h.sum()


def average(h, c, f, t, weight):
    return 0.9 * h + 0.1 * f, c + h, h * c


def views(h, c, f, t, weight):
    return torch.tanh(h * weight + f), c, (f.view(2, 2), f)


def late(h, c, f, t, weight):
    """Outputs, and a sum in the state, that begin at some step, or at some steps alone."""
    h = torch.tanh(h * weight + f)
    loss = h.square().sum() if t % 5 == 4 else torch.zeros(())
    return h, (c + h if t in (6, 11) else c), (loss, weight * f if t >= 10 else torch.ones(4), h.detach())


def rare(h, c, f, t, weight):
    """Nothing has a gradient before step 7, and in the end only the state."""
    return torch.sin(h) + (f if t == 7 else f.detach()), c, torch.ones(4)


STEPS_OF = [gate, average, views, late, rare]


def differentiated(kind, form, how, options):
    torch.manual_seed(0)
    encoder, weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4))
    build, parts = FORMS[form]
    x, numbers = torch.randn(STEPS, 4), torch.arange(STEPS)

    def step(state, given):
        h, c, out = kind(*parts(state), *given, weight)
        return build(h, c), out

    state, inputs = build(torch.zeros(4), torch.zeros(4)), (encoder(x), numbers)
    if options is None:
        outs = []
        for row in zip(*(column.unbind(0) for column in inputs), strict=True):
            state, out = step(state, row)
            outs.append(pytree.tree_leaves(out))
        stack = how == "stack"
        columns = zip(*outs, strict=True)
        out = [torch.stack(c) if stack else sum(c[1:], c[0]) for c in columns]
    else:
        state, out = ts.Loop(step, **options)(state, inputs=inputs, outputs=how)
    found = [*pytree.tree_leaves(state), *pytree.tree_leaves(out)]
    needed = [t.requires_grad for t in found]
    sum(t.square().sum() for t in found if t.requires_grad).backward()
    return [*(t.detach() for t in found), *(p.grad for p in (*encoder.parameters(), weight))], needed


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", STEPS_OF)
def test_gradients_equal_those_of_a_plain_loop(kind, form):
    for how in ("stack", "sum"):
        expected, needed = differentiated(kind, form, how, None)
        for options in OPTIONS:
            found, same = differentiated(kind, form, how, options)
            assert same == needed
            for a, b in zip(found, expected, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)


def test_a_function_as_inputs_gets_its_gradients():
    x = torch.randn(9, 4)
    for start in (torch.zeros(4), torch.zeros(4, requires_grad=True)):
        results = []
        for run in (None, ts.Loop(lambda h, f: torch.tanh(0.9 * h + f), planner="revolve", slots=2)):
            torch.manual_seed(0)
            encoder = nn.Linear(4, 4)

            def inputs(t, encoder=encoder):
                return encoder(x[t]) + torch.randn(4)

            h = start
            if run is None:
                for t in range(9):
                    h = torch.tanh(0.9 * h + inputs(t))
            else:
                h = run(h, 9, inputs=inputs)
                assert run.plan is not None  # not a plain loop with its whole tape
            h.sum().backward()
            results.append((encoder.weight.grad, encoder.bias.grad, torch.get_rng_state()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_that_no_gradient_reaches_get_zeros():
    """What steps cost is found out by a backward of one of them: its gradient is no one's."""
    x = torch.randn(8, 3, requires_grad=True)
    weight = torch.randn(3, requires_grad=True)

    def step(h, given):
        row, t = given
        return torch.tanh(h * weight + row), (row * weight if t >= 4 else torch.zeros(3))

    _, out = ts.Loop(step, planner="revolve", slots=2)(torch.zeros(3), inputs=(x, torch.arange(8)), outputs="stack")
    out.sum().backward()
    assert not x.grad[:4].any()
    assert torch.equal(x.grad[4:], weight.detach().expand(4, 3))


def test_later_calls_look_again_where_a_gradient_begins_late():
    weight, switch = torch.ones(2, requires_grad=True), [False]

    def step(state, t):
        h, c = state
        return torch.sin(h * weight), (c * weight if switch[0] and t == 6 else c)

    run, start = ts.Loop(step, planner="revolve", slots=2), (torch.ones(2), torch.ones(2))
    for _ in range(2):
        assert not run(start, inputs=range(9))[1].requires_grad
    switch[0] = True  # the third call is not looked at
    with pytest.raises(GradientError, match=r"state\[1\] begins to require a gradient at step 6.*run the step again"):
        run(start, inputs=range(9))[0].sum().backward()
    for _ in range(3):
        weight.grad = None
        run(start, inputs=range(9))[1].sum().backward()
        assert torch.equal(weight.grad, torch.ones(2))
