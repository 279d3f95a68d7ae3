"""A program beside the same function under plain autograd: values, gradients, buffers and generators, bit for bit."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tapestream.errors import BudgetError
from tapestream.executor.program.noting import following
from tapestream.executor.program.noting.recorder import Recorder
from tapestream.frontends.program import candidates
from tapestream.frontends.program.program import Program
from tapestream.frontends.program.results import found_in
from tapestream.frontends.program.sizes import Sizes


def outcome(
    function: Callable[..., Any], leaves: Sequence[torch.Tensor], make: Callable[[], Any], seed: int = 0
) -> Any:
    """What one step of ``function(*make())`` leaves behind. ``leaves``: tensors whose ``.grad`` counts; `make` gives
    the arguments anew, those that require gradients being the result of an operation before the call."""
    torch.manual_seed(seed)
    random.seed(seed)
    for leaf in leaves:
        leaf.grad = None
    result = function(*make())
    found = found_in(result)
    loss = torch.zeros(())
    for i, tensor in enumerate(found):
        if tensor.requires_grad:
            loss = loss + (tensor * tensor.conj()).real.float().sum() / (i + 1)
    values = [t.detach().clone() for t in found]
    flags = [t.requires_grad for t in found]
    loss.backward()
    gradients = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    return values, flags, gradients, torch.get_rng_state()


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def compare(
    function: Callable[..., Any],
    leaves: Sequence[torch.Tensor],
    make: Callable[[], Any],
    budget: int | str | None = None,
    *,
    calls: int = 2,
    planner: str = "revolve",
    modules: Sequence[nn.Module] = (),
    reruns: bool = True,
    **options: Any,
) -> Program:
    """Raises AssertionError unless ``calls`` calls of the program equal plain PyTorch; gives the program.

    ``budget`` None: one and a half times the least that the program says it needs. ``reruns``: whether backward of a
    call that is not the first must run something again or bring something back: not where the budget holds all.
    """
    buffers = [b for module in modules for b in module.buffers()]
    before = [b.clone() for b in buffers]
    expected, after = [], []
    for seed in range(calls):
        expected.append(outcome(function, leaves, make, seed))
        after.append([b.clone() for b in buffers])
    restore(buffers, before)
    if budget is None:
        budget = 3 * max(least(function, leaves, make, seed, **options) for seed in range(calls)) // 2
        restore(buffers, before)
    program, again = Program(function, budget=budget, planner=planner, **options), 0
    for seed in range(calls):
        values, flags, gradients, generator = outcome(program, leaves, make, seed)
        wanted = expected[seed]
        if program.report is not None and (seed > 0 or calls == 1):
            again += program.report.reruns
        assert flags == wanted[1]
        assert all(map(same, values, wanted[0])), f"values of call {seed}"
        assert [g is None for g in gradients] == [g is None for g in wanted[2]]
        assert all(map(same, gradients, wanted[2])), f"gradients of call {seed}"
        assert torch.equal(generator, wanted[3])
        assert all(map(torch.equal, buffers, after[seed])), f"buffers of call {seed}"
    assert not reruns or again > 0 or program.copies.copies > 0, "nothing ran again: give a smaller budget"
    return program


def fix_seconds(monkeypatch: pytest.MonkeyPatch, by_name: Mapping[str, float]) -> None:
    """Operations take these seconds by the names of their functions, others 0.1: always the same. And a search for
    plans takes as long as it takes."""

    def seconds(sizes: Sizes) -> Any:
        record = sizes.record
        names = [getattr(record.pattern(k).function, "__name__", "") for k in range(len(record))]
        return numpy.array([by_name.get(name, 0.1) for name in names])

    monkeypatch.setattr(Sizes, "seconds", seconds)
    monkeypatch.setattr(candidates, "_MOST_SECONDS", 1e9)


def hear_followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions of which calls are followed from now on."""
    names: list[str] = []
    call = following.Following.call

    def heard(self: following.Following, function: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, function, args, kwargs)
        if result is not following.UNKNOWN:
            names.append(function.__name__)
        return result

    monkeypatch.setattr(following.Following, "call", heard)
    return names


def hear_noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of calls that are noted closely from now on."""
    found: list[Any] = []
    note = Recorder._noted

    def listed(self: Recorder, func: Any, *given: Any) -> Any:
        found.append(func)
        return note(self, func, *given)

    monkeypatch.setattr(Recorder, "_noted", listed)
    return found


def restore(buffers: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for b, old in zip(buffers, before, strict=True):
            b.copy_(old)


def least(
    function: Callable[..., Any], leaves: Sequence[torch.Tensor], make: Callable[[], Any], seed: int, **options: Any
) -> int:
    """The least budget in bytes with which a call works."""
    try:
        outcome(Program(function, budget=1, planner="revolve", **options), leaves, make, seed)
    except BudgetError as error:
        return error.least_nbytes or 1
    return 1
