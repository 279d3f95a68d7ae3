"""The training loop that ``train`` and ``demo`` share: a streamed GPT on text, one record per step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.models import GPT, Batches, GPTConfig, load_bytes, standard_library_bytes
from tapestream.storage.meter import MemoryMeter, track_memory

_OPTIMIZERS = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD,
}  # fmt: skip

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and how. Sizes as text ("1GiB"); the learning rate rises to ``rate`` over ``warmup`` steps."""

    config: GPTConfig
    data: str
    batch: int
    sequence: int
    steps: int
    rate: float
    warmup: int
    optimizer: str
    update: str
    device: str
    budget: str | None
    host_budget: str | None
    home: str
    folder: str | None

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        return {
            **asdict(self),
            "config": {**asdict(self.config), "dtype": str(self.config.dtype).removeprefix("torch.")},
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Job":
        """The inverse of `to_json`."""
        config = dict(found["config"])
        return cls(**{**found, "config": GPTConfig(**{**config, "dtype": getattr(torch, config["dtype"])})})

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, numbered from 0."""
        return self.rate * min(1.0, (step + 1) / max(1, self.warmup))

    def small(self) -> "Job":
        """The same with a tiny model: it starts the threads and imports that a real one would."""
        width = 64
        config = replace(self.config, layers=2, width=width, heads=1)
        return replace(self, config=config, steps=2, budget="64MiB")


@dataclass(frozen=True, slots=True)
class Record:
    """One step: ``seconds`` of it, ``waiting_seconds`` for copies, ``moved_nbytes`` by "source to target"."""

    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    waiting_seconds: float
    moved_nbytes: dict[str, int]
    planned_peak_nbytes: int
    measured_peak_nbytes: int | None


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch optimizer of this name. Raises InputError for one that is not known."""
    if name not in _OPTIMIZERS:
        raise InputError(f"--optimizer {name} was asked for; those known are {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[name]


def options_of(job: Job) -> dict[str, Any]:
    """Options of the streamed and the plain optimizer: the same implementation, so that bits can be compared."""
    return {"lr": job.rate_at(0), "foreach": False}


def text_of(data: str) -> Tensor:
    """The bytes of ``--data``."""
    return standard_library_bytes() if data == "stdlib" else load_bytes(Path(data))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def streamed(job: Job, progress: Report) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, never whole in memory, and its optimizer."""
    with torch.device("meta"):
        model: nn.Module = GPT(job.config)
    budget = ts.Budget(job.budget, host=job.host_budget)
    model = ts.stream(model, device=job.device, budget=budget, home=job.home, folder=job.folder, progress=progress)
    cls = optimizer_class(job.optimizer)
    return model, ts.optimizer(model, cls, update=job.update, **options_of(job))


def held_nbytes(model: nn.Module) -> int:
    """Device bytes of a streamed model between two steps: resident blocks, and parameters and state outside blocks."""
    handle = handle_of(model)
    outside = sum(p.nbytes + handle.state_nbytes(p) for p in handle.outside_parameters())
    return handle.home_nbytes()[ts.Tier.DEVICE] + outside + sum(b.nbytes for b in model.buffers())


@dataclass(slots=True)
class Measured:
    """Memory over one step: ``held`` bytes at its start, the meter's samples on top, and when each phase began."""

    held: int = 0
    peak: int = 0
    samples: tuple[tuple[float, int], ...] = ()
    phases: tuple[float, ...] = ()


def run(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, text: Tensor, measured: Measured, at: int = 2
) -> Iterator[Record]:
    """Train; yields after each step. Step number ``at`` is metered into ``measured``; the one before it too, since what
    a step frees is seen only if the step that made it was metered."""
    for step, (tokens, targets) in zip(range(job.steps), Batches(text, job.batch, job.sequence), strict=False):
        tokens, targets = tokens.to(job.device), targets.to(job.device)
        set_rate(optimizer, job.rate_at(step))
        start = time.perf_counter()
        if step in (at - 1, at):
            measured.held = held_nbytes(model)
            with track_memory(job.device) as meter:
                loss = _one(model, optimizer, tokens, targets, measured)
            if step == min(at, job.steps - 1):
                _keep(meter, measured)
        else:
            loss = _one(model, optimizer, tokens, targets, None)
        seconds = time.perf_counter() - start
        report = ts.report(model)
        yield Record(
            step, loss, seconds, tokens.numel() / seconds, report.wait_seconds,
            {f"{a.name.lower()} to {b.name.lower()}": n for (a, b), n in report.bytes_moved.items()},
            report.plan.peak_nbytes, measured.peak or None,
        )  # fmt: skip


def _one(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, measured: Measured | None
) -> float:
    begin = time.perf_counter()
    loss = model(tokens, targets)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    value = float(loss.detach())
    if measured is not None:
        measured.phases = (0.0, forward - begin, backward - begin, time.perf_counter() - begin)
    return value


def _keep(meter: MemoryMeter, measured: Measured) -> None:
    measured.peak = measured.held + meter.peak_nbytes
    measured.samples = tuple(meter.samples)
