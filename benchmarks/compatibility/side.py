"""A trainer around a model, by plain PyTorch or with `ts.stream`: what both get, and how they are compared."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import tapestream as ts
from benchmarks.compatibility.trial import Home

_WARM, _ROUNDS = 3, 2  # the first steps are profiled and planned


class Side:
    """Plain PyTorch where the budget is None. ``folder`` is empty, for what a trainer writes."""

    def __init__(self, folder: Path, home: Home = "device", budget: str | int | None = None) -> None:
        self.folder, self._home, self._budget = folder, home, budget
        self._streamed: list[nn.Module] = []
        self._ends: list[float] = []

    def model(self, made: Any) -> Any:
        """The model that the trainer gets; one that was given before is plain again, as in a new process."""
        self.close()
        if self._budget is not None:
            folder = self.folder / "home" if self._home == "disk" else None
            ts.stream(made, device="cpu", budget=self._budget, home=self._home, folder=folder)
            self._streamed.append(made)
        return made

    def optimizer(self, model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
        """Of this class. Weights of 16 bits get no masters: plain PyTorch has none."""
        options = {"lr": 1e-2, "weight_decay": 0.0, **options}
        if self._budget is None:
            return self.watched(kind(model.parameters(), **options))
        return self.watched(ts.optimizer(model, kind, master=None, **options))

    def watched(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The end of each of its steps is noted."""
        optimizer.register_step_post_hook(lambda *_: self._ends.append(time.process_time()))
        return optimizer

    def seconds(self) -> float:
        """Processor time of a step, the first ones left out."""
        ends = self._ends[_WARM - 1 :]
        return median(end - begin for begin, end in pairwise(ends))

    def close(self) -> None:
        """What was streamed is as it was before."""
        while self._streamed:
            ts.unstream(self._streamed.pop())


@dataclass(frozen=True)
class TrainerCase:
    """A `trial.Subject`. ``train`` is as users write it, with the model and optimizer that a `Side` gives; it says
    what is left: all that is logged, and weights."""

    name: str
    train: Callable[[Side], dict[str, torch.Tensor]]

    def plain(self) -> dict[str, torch.Tensor]:
        """Trained by plain PyTorch."""
        return self._run()[0]

    def streamed(self, home: Home, budget: str | int) -> dict[str, torch.Tensor]:
        """Trained with `ts.stream`."""
        return self._run(home, budget)[0]

    def ratio(self) -> float | None:
        """Processor time of a trainer's step with all the room, over plain's: the median of rounds in turn."""
        return median(self._run("device", "16GiB")[1] / self._run()[1] for _ in range(_ROUNDS))

    def _run(self, home: Home = "device", budget: str | int | None = None) -> tuple[dict[str, torch.Tensor], float]:
        with tempfile.TemporaryDirectory() as folder:
            side = Side(Path(folder), home, budget)
            try:
                torch.manual_seed(1)
                return self.train(side), side.seconds()
            finally:
                side.close()
