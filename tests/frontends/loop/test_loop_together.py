"""A tensor in several calls before one backward: its gradient has the bits of plain PyTorch."""

import pytest
import torch
from torch import nn

import tapestream as ts

OPTIONS = [{"planner": "revolve", "slots": 2}, {"planner": "revolve", "slots": 3, "chunk": 3}, {"budget": "1MiB"}]


def once(w):
    return lambda y: torch.sin(y * w) + 0.1


def twice(w):
    return lambda y: torch.sin(y * w) * torch.sigmoid(w) + 0.1


def several(w):
    """The state is used several times in a step."""
    return lambda y: torch.sin(y * w) * 0.5 + y * 0.5 + y.tanh() * 0.1


def one_after_the_other(run, w, raw, h, x):
    first = run(once(w))
    return first(run(twice(w))(first(x, 5), 4), 6)


def with_one_step_at_the_end(run, w, raw, h, x):
    return run(twice(w))(run(once(w))(x, 10), 1)


def with_one_step_at_the_beginning(run, w, raw, h, x):
    return run(once(w))(run(twice(w))(x, 1), 10)


def beside_each_other(run, w, raw, h, x):
    a, b, c = run(once(w))(x, 5), run(twice(w))(2 * x, 6), run(several(w))(3 * x, 4)
    return b + a * b + c


def plain_code_first(run, w, raw, h, x):
    return run(once(w))(run(once(w))(twice(w)(x) + w, 5), 5)


def plain_code_between_single_uses(run, w, raw, h, x):
    """The last call to run backward adds one part alone: nothing is handed on to it."""
    return run(once(w))(once(w)(run(once(w))(x, 1)), 5)


def captured(run, w, raw, h, x):
    scale = torch.nn.functional.softplus(raw)
    return run(once(raw))(run(once(scale))(run(once(raw))(run(twice(scale))(x, 3), 5), 4), 3)


def initial_state(run, w, raw, h, x):
    made = h * raw
    return run(several(w))(h, 5) + run(several(w))(h, 6) + run(several(w))(made, 1) * run(several(w))(made, 4)


def some_are_dropped(run, w, raw, h, x):
    first = run(once(w))(x, 5)
    run(once(w))(first, 3)  # nobody asks for its gradient
    return run(once(w))(first.detach(), 4) + first


def gradients(how, options, mode):
    torch.manual_seed(0)
    w, raw, h = (nn.Parameter(torch.randn(*size)) for size in ((64,), (64,), (4, 64)))

    def run(step):
        def plain(y, steps):
            for _ in range(steps):
                y = step(y)
            return y

        return plain if options is None else lambda y, steps: ts.Loop(step, **options)(y, steps=steps)

    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    loss = how(run, w, raw, h, torch.randn(4, 64)).square().sum()
    if mode == "grad":
        return torch.autograd.grad(loss, (w, raw, h), allow_unused=True)
    loss.backward()
    return [w.grad, raw.grad, h.grad, *seen]


KINDS = [
    one_after_the_other, with_one_step_at_the_end, with_one_step_at_the_beginning, beside_each_other, plain_code_first,
    plain_code_between_single_uses, captured, initial_state, some_are_dropped,
]  # fmt: skip


@pytest.mark.parametrize("how", KINDS)
def test_one_sum(how):
    for mode in ("backward", "grad"):
        expected = gradients(how, None, mode)
        for options in OPTIONS:
            found = gradients(how, options, mode)
            assert len(found) == len(expected)
            for a, b in zip(found, expected, strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("regions", [1, 2])
def test_one_sum_of_weights_that_autocast_casts(regions):
    """Within one autocast their parts are added in the dtype of the cast, and cast back once."""

    def gradient(options):
        torch.manual_seed(0)
        layer, h, x = nn.Linear(8, 8), torch.zeros(4, 8), torch.randn(6, 4, 8)

        def step(h, row):
            return torch.tanh(layer(h) + row).float()

        def call(h):
            if options is not None:
                return ts.Loop(step, **options)(h, inputs=x)
            for row in x:
                h = step(h, row)
            return h

        for _ in range(regions):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(4 // regions):
                    h = call(h)
        h.square().sum().backward()
        return layer.weight.grad, layer.bias.grad

    expected = gradient(None)
    for options in OPTIONS:
        assert all(torch.equal(a, b) for a, b in zip(gradient(options), expected, strict=True))


def test_a_backward_that_fails_leaves_nothing_for_the_next():
    w, x = torch.randn(8, requires_grad=True), torch.randn(8)
    run, fail = ts.Loop(once(w), planner="revolve", slots=2), [True]

    def refuse(gradient):
        if fail[0]:
            raise ValueError("no")

    first = run(x, steps=4)
    first.register_hook(refuse)
    second = run(first, steps=4)
    with pytest.raises(ValueError, match="no"):
        second.sum().backward()
    assert w.grad is None
    fail[0] = False
    expected = torch.autograd.grad(plain(once(w), x, 4).sum(), w)
    assert torch.equal(torch.autograd.grad(first.sum(), w)[0], expected[0])


def plain(step, y, steps):
    for _ in range(steps):
        y = step(y)
    return y
