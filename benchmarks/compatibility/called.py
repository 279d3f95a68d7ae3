"""A package's code, called through `ts.Loop` or `ts.Program` beside plain PyTorch, and every bit compared."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

import tapestream as ts
from benchmarks.common import Row
from benchmarks.compatibility.trial import difference, said
from tapestream.errors import BudgetError, TapestreamError

_STEPS, _ROUNDS, _AMPLE = 3, 7, 16 * 2**30


@dataclass(frozen=True)
class CallSubject:
    """As users write it. ``whole`` takes all inputs. ``step`` takes a state (the first is made by ``begin``) and one
    input, and gives the next state and an output; None where there is only the whole."""

    module: nn.Module
    inputs: torch.Tensor
    whole: Callable[[torch.Tensor], Any]
    step: Callable[[Any, torch.Tensor], Any] | None = None
    begin: Callable[[], Any] = tuple


@dataclass(frozen=True)
class CallCase:
    """``make`` gives equal weights at every call. ``searched``: twice the least budget is tried, too."""

    name: str
    way: Literal["Loop", "Program"]
    make: Callable[[], CallSubject]
    searched: bool = True


def tried_call(case: CallCase) -> Row:
    """How it went, as `benchmarks.compatibility.trial.tried` says it."""
    row: Row = {"name": case.name, "way": f"ts.{case.way}"}
    try:
        wanted, again = _trained(case, None), _trained(case, None)
    except Exception as error:
        return {**row, "outcome": "not run", "why": said(error)}
    if difference(wanted, again) is not None:
        return {**row, "outcome": "not run", "why": "plain PyTorch does not repeat its own bits"}
    for place in ("all room", "twice the least")[: 1 + case.searched]:
        try:
            found = _trained(case, _AMPLE if place == "all room" else 2 * _least(case))
        except TapestreamError as error:
            return {**row, "outcome": "refused", "where": place, "why": said(error)}
        except Exception as error:
            return {**row, "outcome": "raw error", "where": place, "why": f"{type(error).__name__}: {said(error)}"}
        name = difference(wanted, found)
        if name is not None:
            return {**row, "outcome": "WRONG", "where": place, "why": f"{name} differs"}
    row["ratio"] = round(_ratio(case), 2)
    return {**row, "outcome": "exact", "tight": "yes" if case.searched else "no"}


def _runner(case: CallCase, written: CallSubject, budget: int | None) -> Callable[[], Any]:
    """Plain where the budget is None. A tight plan is by Revolve: a search for a better one takes longer than this."""
    if case.way == "Program":
        planner = "auto" if budget == _AMPLE else "revolve"
        whole = written.whole if budget is None else ts.Program(written.whole, budget=budget, planner=planner)
        return lambda: whole(written.inputs)
    if budget is None:
        return lambda: written.whole(written.inputs)
    assert written.step is not None
    loop = ts.Loop(written.step, budget=budget)
    return lambda: loop(written.begin(), inputs=written.inputs, outputs="stack")


def _loss(result: Any) -> torch.Tensor:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def _trained(case: CallCase, budget: int | None) -> dict[str, torch.Tensor]:
    """Losses, gradients, weights, buffers and generators of some steps."""
    torch.manual_seed(0)
    written = case.make()
    run, left = _runner(case, written, budget), dict[str, torch.Tensor]()
    optimizer = torch.optim.SGD(written.module.parameters(), lr=0.05)
    torch.manual_seed(1)
    numpy.random.seed(1)
    for k in range(_STEPS):
        loss = _loss(run())
        loss.backward()
        left[f"loss {k}"] = loss.detach()
        gradients = {name: p.grad for name, p in written.module.named_parameters()}
        left |= {f"gradient {k} {name}": grad.clone() for name, grad in gradients.items() if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    left |= {name: value.detach().clone() for name, value in written.module.named_parameters()}
    left |= {name: value.detach().clone() for name, value in written.module.named_buffers()}
    return {**left, "generator": torch.get_rng_state(), "NumPy's": torch.tensor(numpy.random.rand())}


def _least(case: CallCase) -> int:
    """The budget that the error of a byte names."""
    try:
        _trained(case, 1)
    except BudgetError as error:
        if error.least_nbytes is not None:
            return error.least_nbytes
        raise
    return 1


def _ratio(case: CallCase) -> float:
    """Processor time of a step with all the room, over plain's: the median of rounds in turn, on one module."""
    written = case.make()
    runs, taken = [_runner(case, written, budget) for budget in (_AMPLE, None)], list[tuple[float, ...]]()
    for number in range(-3, _ROUNDS):
        seconds = []
        for run in runs:
            begin = time.process_time()
            _loss(run()).backward()
            seconds.append(time.process_time() - begin)
        if number >= 0:
            taken.append(tuple(seconds))
    return median(ours / theirs for ours, theirs in taken)
