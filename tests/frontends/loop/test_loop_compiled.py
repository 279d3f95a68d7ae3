"""Compiled chunks: gradients equal those of a plain loop over the same compiled chunks, bit for bit."""

import shutil

import pytest
import torch
from looping import captured, differentiated, in_place, lstm_cell, same, seeded, tanh_rnn
from torch import nn

import tapestream as ts
from tapestream.costs import Budget
from tapestream.errors import InputError
from tapestream.frontends.loop.costs import StepCost
from tapestream.frontends.loop.plans import choose, lengths

# What it imports warns of itself.
INDUCTOR = [pytest.mark.full, pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]


def compiled_chunk(step, length, backend):
    def chunk(h):
        for _ in range(length):
            h = step(h)
        return h

    return torch.compile(chunk, fullgraph=True, dynamic=False, backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the plain loop
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "stage"), [(tanh_rnn, 8), (lstm_cell, 4)])
def test_equal_to_a_loop_over_compiled_chunks(kind, stage, backend, monkeypatch):
    """Chunks of 4 steps; a stage is one of them or two."""

    def in_chunks():
        step, state, leaves = kind()
        return compiled_chunk(step, 4, backend), state, leaves

    monkeypatch.setattr("tapestream.frontends.loop.compiled.LONGEST", 4)
    expected, _ = differentiated(in_chunks, 6, None)
    found, run = differentiated(kind, 24, {"planner": "revolve", "slots": 2, "chunk": stage, "compile": backend})
    assert run.plan.schedule.stages == 24 // stage
    ours, theirs = (one.state if isinstance(one.state, tuple) else (one.state,) for one in (found, expected))
    assert all(map(same, ours, theirs))
    assert all(map(same, found.gradients, expected.gradients))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["stack", "sum"])
def test_inputs_outputs_and_a_rest(how, backend):
    """21 steps in chunks of 4, as close to plain PyTorch as another order of operations allows."""

    def program(loop):
        seeded()
        cell, head = nn.RNNCell(3, 4), nn.Linear(4, 2)
        rows, h = torch.randn(21, 2, 3).requires_grad_(), torch.randn(2, 4).requires_grad_()

        def step(h, x):
            h = cell(x, h)
            return h, head(h)

        if loop:
            options = {"planner": "revolve", "slots": 2, "chunk": 4, "compile": backend}
            h, out = ts.Loop(step, **options)(h, inputs=rows, outputs=how)
        else:
            ys = []
            for x in rows:
                h, y = step(h, x)
                ys.append(y)
            out = torch.stack(ys) if how == "stack" else sum(ys)
        (out.sin().sum() + h.sum()).backward()
        return [out, rows.grad, *(p.grad for p in (*cell.parameters(), *head.parameters()))]

    for ours, theirs in zip(program(True), program(False), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("steps", "unit"), [(100, 1), (100, 8), (7, 8), (1, 1), (1_000_000, 32)])
def test_stages_of_a_compiled_loop_are_multiples_of_its_chunks(steps, unit):
    found = list(lengths(steps, unit))
    assert all(length % unit == 0 for length in found)
    assert found == sorted(set(found))
    assert found[0] == unit or found[0] >= steps
    assert steps <= found[-1] < steps + unit
    cost = StepCost(1e-6, 2e-6, 1000, 3000, between_nbytes=1000)
    few = choose(cost, steps, Budget(1_000_000), "auto", None, {}, unit=unit)
    assert few.chunk in found
    assert len(few.plan.profile) == -(-steps // few.chunk)


def test_without_a_compiler_it_is_refused(monkeypatch):
    step, h, _ = tanh_rnn()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match=r"no C\+\+ compiler was found.*leave compile out"):
        ts.Loop(step, compile=True)(h, steps=8)


def test_refusals():
    for kind in (captured, in_place):
        with pytest.raises(InputError, match="compile=True"):
            differentiated(kind, 8, {"compile": "aot_eager"})
    step, h, _ = tanh_rnn()
    with pytest.raises(InputError, match="cannot stop inside a chunk"):
        ts.Loop(step, compile="aot_eager")(h, until=lambda h: h.sum() > 9, max_steps=3)
