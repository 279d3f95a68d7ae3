"""One model or method, trained by plain PyTorch and by `ts.stream`, and every bit compared."""

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import Row
from tapestream.errors import BudgetError, TapestreamError

Home = Literal["device", "disk"]
_STEPS, _TRIES, _ROUNDS = 3, 8, 5


class Subject(Protocol):
    """What can be trained by plain PyTorch and by tapestream. What a way leaves behind has the same names in both."""

    @property
    def name(self) -> str: ...

    def plain(self) -> dict[str, torch.Tensor]:
        """By plain PyTorch."""

    def streamed(self, home: Home, budget: str | int) -> dict[str, torch.Tensor]:
        """By `ts.stream`."""

    def ratio(self) -> float | None:
        """Time of a step with all the room, over plain's."""


def tried(case: Subject) -> Row:
    """How it went: exact, refused (and why), or something that must not be. Plain PyTorch has to repeat itself."""
    row: Row = {"name": case.name}
    try:
        wanted, again = case.plain(), case.plain()
    except Exception as error:
        return {**row, "outcome": "not run", "why": said(error)}
    if difference(wanted, again) is not None:
        return {**row, "outcome": "not run", "why": "plain PyTorch does not repeat its own bits"}
    for place, home, budget in (("all room", "device", "16GiB"), ("least room, disk", "disk", None)):
        try:
            found = least(case, home) if budget is None else case.streamed(home, budget)  # type: ignore[arg-type]
        except TapestreamError as error:
            return {**row, "outcome": "refused", "where": place, "why": said(error)}
        except Exception as error:
            return {**row, "outcome": "raw error", "where": place, "why": f"{type(error).__name__}: {said(error)}"}
        name = difference(wanted, found)
        if name is not None:
            return {**row, "outcome": "WRONG", "where": place, "why": f"{name} differs"}
        if budget is not None and (ratio := case.ratio()) is not None:
            row["ratio"] = round(ratio, 2)
    return {**row, "outcome": "exact"}


def least(case: Subject, home: Home) -> dict[str, torch.Tensor]:
    """Trained in the least budget that works, as the errors name it."""
    budget = 1
    for _ in range(_TRIES):
        try:
            return case.streamed(home, budget)
        except BudgetError as error:
            if error.least_nbytes is None or error.least_nbytes <= budget:
                raise
            budget = error.least_nbytes
    return case.streamed(home, budget)


@dataclass(frozen=True)
class Case:
    """A `Subject` trained in a loop of its own. ``model`` has equal weights at every call; ``loss`` of it, on a batch
    that is always the same. ``optimizer``: its class and options; ``timed``: a step takes long enough for its time to
    say something."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    options: tuple[tuple[str, Any], ...] = (("lr", 1e-3),)
    timed: bool = True

    def plain(self) -> dict[str, torch.Tensor]:
        """Trained by plain PyTorch."""
        model = self.model()
        return self._trained(model, self.optimizer(model.parameters(), **dict(self.options)))

    def streamed(self, home: Home, budget: str | int) -> dict[str, torch.Tensor]:
        """Trained by `ts.stream`."""
        with tempfile.TemporaryDirectory() as folder:
            model = self.model()
            ts.stream(model, device="cpu", budget=budget, home=home, folder=folder if home == "disk" else None)
            try:
                return self._trained(model, ts.optimizer(model, self.optimizer, **dict(self.options)))
            finally:
                ts.unstream(model)

    def ratio(self) -> float | None:
        """Processor time of a step with all the room, over plain's: the median of rounds in turn."""
        if not self.timed:
            return None
        ours, theirs = self.model(), self.model()
        ts.stream(ours, device="cpu", budget="16GiB", home="device")
        pairs = [(ours, ts.optimizer(ours, self.optimizer, **dict(self.options))),
                 (theirs, self.optimizer(theirs.parameters(), **dict(self.options)))]  # fmt: skip
        taken: list[tuple[float, ...]] = []
        gc.collect()
        for number in range(-2, _ROUNDS):
            seconds = tuple(self._step(model, optimizer) for model, optimizer in pairs)
            if number >= 0:
                taken.append(seconds)
        ts.unstream(ours)
        return median(a / b for a, b in taken)

    def _trained(self, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        """Some steps; every loss, weight and buffer."""
        torch.manual_seed(1)
        left = dict[str, torch.Tensor]()
        for k in range(_STEPS):
            loss = self.loss(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            left[f"loss {k}"] = loss.detach().clone()
        return left | held(model)

    def _step(self, model: nn.Module, optimizer: Any) -> float:
        begin = time.process_time()
        self.loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of weights and buffers, by name."""
    state = model.state_dict().items()  # of some models, with numbers and text beside
    return {name: value.detach().clone() for name, value in state if isinstance(value, torch.Tensor)}


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
