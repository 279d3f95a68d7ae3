"""What goes into steps and what comes out of them: rows, files, functions, ranges; stacks, sums, functions."""

import operator

import numpy
import pytest
import torch
from looping import loss_of, same, seeded
from torch import nn
from torch.utils import _pytree as pytree

import tapestream as ts

STEPS = 21
OPTIONS = [{"planner": "revolve", "slots": 3}, {"planner": "revolve", "slots": 2, "chunk": 4}, {"budget": "1GiB"}]


def cell_step():
    cell = nn.RNNCell(3, 4)
    return cell, lambda h, x: cell(x, h)


def grads(tensors):
    return [t.grad for t in tensors]


def differing(ours, theirs):
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not same(a, b)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["tensor", "tree", "array", "file", "function", "range"])
def test_inputs(kind, options, tmp_path):
    def program(loop):
        seeded()
        cell, _ = cell_step()
        scale = torch.randn(3).requires_grad_()
        rows, h = torch.randn(STEPS, 2, 3), torch.randn(2, 4).requires_grad_()
        leaves = [h, scale, *cell.parameters()]
        step, inputs, row = (lambda h, x: cell(x * scale, h)), rows, lambda t: rows[t]
        if kind == "tensor":
            inputs = rows.requires_grad_()
            leaves.append(inputs)
        elif kind == "tree":
            factors = torch.rand(STEPS).requires_grad_()
            leaves.append(factors)
            step, inputs = (lambda h, x: cell(x["x"] * scale * x["f"], h)), {"x": rows, "f": factors}
            row = lambda t: {"x": rows[t], "f": factors[t]}  # noqa: E731
        elif kind == "array":
            inputs = rows.numpy()
        elif kind == "file":
            array = numpy.memmap(tmp_path / "rows", numpy.float32, "w+", shape=tuple(rows.shape))
            array[:] = rows.numpy()
            array.flush()
            inputs = numpy.memmap(tmp_path / "rows", numpy.float32, "r", shape=tuple(rows.shape))
        elif kind == "function":
            inputs = row = lambda t: torch.cos(scale * t).expand(2, 3)
        else:
            inputs = range(5, 5 + 2 * STEPS, 2)
            step, row = (lambda h, t: torch.tanh(h + scale.sum() * t)), inputs.__getitem__
        if loop:
            steps = STEPS if kind == "function" else None
            final = ts.Loop(step, **options)(h, steps, inputs=inputs)
        else:
            final = h
            for t in range(STEPS):
                final = step(final, row(t))
        loss_of(final).backward()
        return [final, *grads(leaves)]

    assert not differing(program(True), program(False))


def with_output(kind):
    cell = nn.GRUCell(3, 3)
    head = nn.Linear(3, 2)

    def step(h, x):
        new = cell(x * h.sum(), h) + h * torch.tanh(h)  # h is used several times: sums have an order
        if kind == "state":
            return new, new
        if kind == "tree":
            return new, {"a": head(new), "b": (new.detach() ** 2, h)}
        return new, head(new)

    return [*cell.parameters(), *head.parameters()], step


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["head", "state", "tree"])
@pytest.mark.parametrize("how", ["stack", "sum"])
def test_outputs(how, kind, every, options):
    def program(loop):
        seeded()
        parameters, step = with_output(kind)
        h, rows = torch.randn(2, 3).requires_grad_(), torch.randn(STEPS, 2, 3).requires_grad_()
        if loop:
            final, out = ts.Loop(step, **options)(h, inputs=rows, outputs=how, every=every)
        else:
            final, found = h, []
            for t in range(STEPS):
                final, y = step(final, rows[t])
                if (t + 1) % every:
                    continue
                if how == "stack":
                    found.append(y)
                else:
                    found = [pytree.tree_map(operator.add, found[0] if found else pytree.tree_map(lambda _: 0, y), y)]
            out = found[0] if how == "sum" else pytree.tree_map(lambda *column: torch.stack(column), *found)
        loss_of(final, out).backward()
        return [final, *pytree.tree_leaves(out), *grads([h, rows, *parameters])]

    assert not differing(program(True), program(False))
