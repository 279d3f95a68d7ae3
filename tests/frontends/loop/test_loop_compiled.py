"""Compiled chunks: gradients equal those of a plain loop over the same compiled chunks, bit for bit."""

import shutil

import pytest
import torch
from looping import captured, differentiated, in_place, lstm_cell, same, seeded, tanh_rnn
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]


def compiled_chunk(step, length, backend):
    def chunk(h):
        for _ in range(length):
            h = step(h)
        return h

    return torch.compile(chunk, fullgraph=True, dynamic=False, backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of the plain loop
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [tanh_rnn, lstm_cell])
def test_equal_to_a_loop_over_compiled_chunks(kind, backend):
    def in_chunks():
        step, state, leaves = kind()
        return compiled_chunk(step, 4, backend), state, leaves

    expected, _ = differentiated(in_chunks, 6, None)
    found, run = differentiated(kind, 24, {"planner": "revolve", "slots": 2, "chunk": 4, "compile": backend})
    assert run.plan.schedule.stages == 6
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
