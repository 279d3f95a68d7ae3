"""Loops over NumPy arrays with a hand-written adjoint."""

import numpy
import pytest
import torch

import tapestream as ts
from tapestream.errors import InputError

N = 32


def wave(in_place):
    """Leapfrog for u'' = c u_xx on a ring; the speeds c are a part of the state that no step changes."""

    def bend(u):
        return numpy.roll(u, 1) - 2 * u + numpy.roll(u, -1)

    def step(state, source=None):
        u, v, c = state
        if in_place:
            v += 0.1 * c * bend(u)
            u += v
        else:
            v = v + 0.1 * c * bend(u)
            u = u + v
        if source is not None:
            u = u + source
        return u, v, c

    def adjoint(state, cotangent, source=None):
        u, _, c = state
        du, dv, dc = cotangent
        dv = dv + du
        return du + 0.1 * bend(c * dv), dv, dc + 0.1 * bend(u) * dv

    return step, adjoint


def by_autograd(state, steps, sources=None):
    u, v, c = state
    bend = lambda u: torch.roll(u, 1) - 2 * u + torch.roll(u, -1)  # noqa: E731
    for t in range(steps):
        v = v + 0.1 * c * bend(u)
        u = u + v
        if sources is not None:
            u = u + sources[t]
    return u, v, c


def start():
    torch.manual_seed(0)
    u, v, c = (torch.rand(N, dtype=torch.float64) for _ in range(3))
    return u.requires_grad_(), v, c.requires_grad_()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "options", [{"planner": "revolve", "slots": 3}, {"slots": 3, "planner": "revolve", "chunk": 5}, {}]
)
def test_against_autograd(in_place, options):
    step, adjoint = wave(in_place)
    ours, theirs = start(), start()
    before = ours[0].detach().clone()
    out = ts.Loop(step, adjoint=adjoint, **options)(ours, steps=57)
    expected = by_autograd(theirs, 57)
    assert torch.equal(ours[0], before)
    for found, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(found, wanted)
    (out[0] ** 2).sum().backward()
    (expected[0] ** 2).sum().backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[2].grad, theirs[2].grad)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("engine", ["adversarial", "threads"])
def test_restart_checkpoints_on_a_disk(in_place, engine, tmp_path):
    step, adjoint = wave(in_place)
    link = ts.Link(1e9)
    machine = ts.Machine({(ts.Tier.DEVICE, ts.Tier.DISK): link, (ts.Tier.DISK, ts.Tier.DEVICE): link})
    ours, theirs = start(), start()
    run = ts.Loop(
        step, adjoint=adjoint, planner="async_multistage", slots=2, interval=4, folder=tmp_path, machine=machine,
        engine=engine,
    )  # fmt: skip
    (run(ours, steps=57)[0] ** 2).sum().backward()
    (by_autograd(theirs, 57)[0] ** 2).sum().backward()
    assert run.plan.simulation.bytes_moved[ts.Tier.DEVICE, ts.Tier.DISK] > 0
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    torch.testing.assert_close(ours[2].grad, theirs[2].grad)


def test_until_and_inputs():
    step, adjoint = wave(False)
    ours, theirs = start(), start()
    sources = 0.01 * torch.rand(200, dtype=torch.float64).numpy()
    far = lambda state: abs(state[0]).max() > 3  # noqa: E731
    out = ts.Loop(lambda s, x: step(s, x), adjoint=lambda s, g, x: adjoint(s, g, x), slots=4, planner="online")(
        ours, inputs=sources, until=far
    )
    steps = next(n for n in range(1, 200) if far([t.detach().numpy() for t in by_autograd(start(), n, sources)]))
    expected = by_autograd(theirs, steps, sources)
    torch.testing.assert_close(out[0], expected[0])
    out[0].sum().backward()
    expected[0].sum().backward()
    torch.testing.assert_close(ours[2].grad, theirs[2].grad)


def test_arrays_in_arrays_out():
    step, adjoint = wave(False)
    state = tuple(t.detach().numpy() for t in start())
    out = ts.Loop(step, adjoint=adjoint)(state, steps=9)
    assert all(isinstance(leaf, numpy.ndarray) for leaf in out)
    numpy.testing.assert_allclose(out[0], by_autograd(start(), 9)[0].detach().numpy())


def test_refusals():
    step, adjoint = wave(False)
    with pytest.raises(InputError, match=r"adjoint= returned the structure"):
        ts.Loop(step, adjoint=lambda s, g: adjoint(s, g)[:2])(start(), steps=3)[0].sum().backward()
    with pytest.raises(InputError, match="does not support outputs"):
        ts.Loop(step, adjoint=adjoint)(start(), steps=3, outputs="sum")
    with pytest.raises(InputError, match=r"step 0 returned state\[1\] = \(32,\) float32 instead of \(32,\) float64"):
        ts.Loop(lambda s: (s[0], s[1].astype("f4"), s[2]), adjoint=adjoint)(start(), steps=3)
