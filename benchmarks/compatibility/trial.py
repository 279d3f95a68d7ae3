"""One model or method, trained by plain PyTorch and by `ts.stream`, and every bit compared."""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import Row
from tapestream.errors import BudgetError, TapestreamError

Home = Literal["device", "disk"]
_STEPS, _TRIES, _ROUNDS = 3, 8, 5


@dataclass(frozen=True)
class Case:
    """``model`` has equal weights at every call; ``loss`` of it, on a batch that is always the same. ``optimizer``:
    its class and options; ``timed``: a step takes long enough for its time to say something."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-3),)
    timed: bool = True


@dataclass(frozen=True)
class Trained:
    """What some steps leave behind, by name, and the processor time of the last ones."""

    left: dict[str, torch.Tensor]
    seconds: float


def tried(case: Case) -> Row:
    """How it went: exact, refused (and why), or something that must not be. Plain PyTorch has to repeat itself."""
    row: Row = {"name": case.name}
    try:
        wanted, again = plain(case), plain(case)
    except Exception as error:
        return {**row, "outcome": "not run", "why": said(error)}
    if difference(wanted.left, again.left) is not None:
        return {**row, "outcome": "not run", "why": "plain PyTorch does not repeat its own bits"}
    for place, home, budget in (("all room", "device", "16GiB"), ("least room, disk", "disk", None)):
        try:
            found = least(case, home) if budget is None else streamed(case, home, budget)  # type: ignore[arg-type]
        except TapestreamError as error:
            return {**row, "outcome": "refused", "where": place, "why": said(error)}
        except Exception as error:
            return {**row, "outcome": "raw error", "where": place, "why": f"{type(error).__name__}: {said(error)}"}
        name = difference(wanted.left, found.left)
        if name is not None:
            return {**row, "outcome": "WRONG", "where": place, "why": f"{name} differs"}
        if budget is not None and case.timed:
            row["ratio"] = round(ratio(case), 2)
    return {**row, "outcome": "exact"}


def plain(case: Case) -> Trained:
    """Trained by plain PyTorch."""
    model = case.model()
    return trained(model, case.optimizer(model.parameters(), **dict(case.options)), case)


def streamed(case: Case, home: Home, budget: str | int) -> Trained:
    """Trained by `ts.stream`."""
    with tempfile.TemporaryDirectory() as folder:
        model = case.model()
        ts.stream(model, device="cpu", budget=budget, home=home, folder=folder if home == "disk" else None)
        try:
            return trained(model, ts.optimizer(model, case.optimizer, **dict(case.options)), case)
        finally:
            ts.unstream(model)


def least(case: Case, home: Home) -> Trained:
    """Trained in the least budget that works, as the errors name it."""
    budget = 1
    for _ in range(_TRIES):
        try:
            return streamed(case, home, budget)
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes <= budget:
                raise
            budget = error.least_nbytes
    return streamed(case, home, budget)


def trained(model: nn.Module, optimizer: Any, case: Case) -> Trained:
    """Some steps; every loss, weight and buffer."""
    torch.manual_seed(1)
    left, begin = dict[str, torch.Tensor](), time.process_time()
    for k in range(_STEPS):
        loss = case.loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left[f"loss {k}"] = loss.detach().clone()
    seconds = time.process_time() - begin
    state = model.state_dict().items()  # of some models, with numbers and text beside
    left |= {name: value.detach().clone() for name, value in state if isinstance(value, torch.Tensor)}
    return Trained(left, seconds)


def ratio(case: Case) -> float:
    """Processor time of a step with all the room, over plain's: the median of rounds in turn."""
    ours, theirs = case.model(), case.model()
    ts.stream(ours, device="cpu", budget="16GiB", home="device")
    pairs = [(ours, ts.optimizer(ours, case.optimizer, **dict(case.options))),
             (theirs, case.optimizer(theirs.parameters(), **dict(case.options)))]  # fmt: skip
    taken: list[tuple[float, ...]] = []
    gc.collect()
    for number in range(-2, _ROUNDS):
        seconds = tuple(_step(model, optimizer, case) for model, optimizer in pairs)
        if number >= 0:
            taken.append(seconds)
    ts.unstream(ours)
    return median(a / b for a, b in taken)


def _step(model: nn.Module, optimizer: Any, case: Case) -> float:
    begin = time.process_time()
    case.loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - begin


def difference(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str | None:
    """The first that is not the same, bit for bit; NaN is itself."""
    if wanted.keys() != found.keys():
        return min(wanted.keys() ^ found.keys())
    for name, value in wanted.items():
        other = found[name]
        same = value.dtype == other.dtype and value.shape == other.shape
        if not same or not torch.equal(torch.nan_to_num(value), torch.nan_to_num(other)):
            return name
    return None


def said(error: BaseException) -> str:
    """The first line of what it says."""
    lines = str(error).strip().splitlines()
    return lines[0][:400] if lines else type(error).__name__
