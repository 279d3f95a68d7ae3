"""The training loop that ``train`` and ``demo`` share: a streamed network on its data, one record per step."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.cli.chosen import chosen_dtype
from tapestream.errors import InputError
from tapestream.frontends.module.stream import handle_of
from tapestream.models import GPT, DRANet, DRANetConfig, GPTConfig, ResNet, ResNetConfig
from tapestream.storage.meter import MemoryMeter, track_memory

_OPTIMIZERS = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD, "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax, "asgd": torch.optim.ASGD, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
}  # fmt: skip

Report = Callable[[str, int, int], None]
Config: TypeAlias = GPTConfig | ResNetConfig | DRANetConfig
Batch: TypeAlias = tuple[Tensor, Tensor]
"""What a model is called with: tokens or images, and targets."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, and how. Sizes as text ("1GiB"); the learning rate rises to ``rate`` over ``warmup`` steps.
    ``sequence``: tokens of a sequence, or pixels of an image's side."""

    config: Config
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
    seed: int = 0
    dtype: str = "fp32"

    def to_json(self) -> dict[str, Any]:
        """Fields by name."""
        return {**asdict(self), "config": config_to_json(self.config)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Job":
        """The inverse of `to_json`."""
        return cls(**{**found, "config": config_from_json(found["config"])})

    def __post_init__(self) -> None:
        """Raises InputError for an optimizer that is not known: before anything is made."""
        optimizer_class(self.optimizer)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, numbered from 0."""
        return self.rate * min(1.0, (step + 1) / max(1, self.warmup))

    def small(self) -> "Job":
        """The same with a tiny GPT: it starts the threads and imports that a real one would."""
        width = 64
        assert isinstance(self.config, GPTConfig)
        config = replace(self.config, layers=2, width=width, heads=1)
        return replace(self, config=config, steps=2, budget="64MiB")


@dataclass(frozen=True, slots=True)
class Record:
    """One step: ``seconds`` of it, ``waiting_seconds`` for copies, ``moved_nbytes`` by "source to target".
    ``tokens_per_second``: None for images."""

    step: int
    loss: float
    seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    waiting_seconds: float
    moved_nbytes: dict[str, int]
    planned_peak_nbytes: int
    measured_peak_nbytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Fields by name; None for a loss that is no number or infinite, for which JSON has no word."""
        return {**asdict(self), "loss": self.loss if math.isfinite(self.loss) else None}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The torch optimizer of this name. Raises InputError for one that is not known."""
    if name not in _OPTIMIZERS:
        raise InputError(f"--optimizer {name} was asked for; the known ones are {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[name]


def options_of(job: Job) -> dict[str, Any]:
    """Options of the streamed and the plain optimizer: the same implementation, so that bits can be compared."""
    return {"lr": job.rate_at(0), "foreach": False}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def model_of(config: Config, seed: int = 0) -> GPT | ResNet | DRANet:
    """The network of this shape."""
    match config:
        case GPTConfig():
            return GPT(config, seed=seed)
        case ResNetConfig():
            return ResNet(config, seed=seed)
        case DRANetConfig():
            return DRANet(config, seed=seed)


def config_to_json(config: Config) -> dict[str, Any]:
    """Fields by name, and ``model``: which network they shape."""
    fields = asdict(config)
    if isinstance(config, GPTConfig):
        fields["dtype"] = str(config.dtype).removeprefix("torch.")
    return {"model": type(config).__name__.removesuffix("Config"), **fields}


def config_from_json(found: dict[str, Any]) -> Config:
    """The inverse of `config_to_json`."""
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    match fields.pop("model"):
        case "GPT":
            return GPTConfig(**{**fields, "dtype": getattr(torch, fields["dtype"])})
        case "ResNet":
            return ResNetConfig(**fields)
        case _:
            backbone = config_from_json({"model": "ResNet", **fields.pop("backbone")})
            assert isinstance(backbone, ResNetConfig)
            return DRANetConfig(backbone, **fields)


def streamed(job: Job, progress: Report) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, never whole in memory, and its optimizer; PyTorch's generators begin at the seed."""
    torch.manual_seed(job.seed)
    with torch.device("meta"):
        hollow = model_of(job.config, job.seed).to(chosen_dtype(job.dtype))
    budget = ts.Budget(job.budget, host=job.host_budget)
    model = ts.stream(
        hollow, device=job.device, budget=budget, home=job.home, folder=job.folder, blocks=list(hollow.blocks),
        progress=progress,
    )  # fmt: skip
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
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch], measured: Measured,
    at: int = 2, first: int = 0,
) -> Iterator[Record]:  # fmt: skip
    """Train from step ``first`` on; yields after each step. The step ``at`` after it is metered into ``measured``; the
    one before that too, since what a step frees is seen only if the step that made it was metered."""
    at += first
    for step, (inputs, targets) in zip(range(first, job.steps), batches, strict=False):
        inputs, targets = inputs.to(job.device), targets.to(job.device)
        if inputs.is_floating_point():
            inputs = inputs.to(chosen_dtype(job.dtype))
        set_rate(optimizer, job.rate_at(step))
        start = time.perf_counter()
        if step in (at - 1, at):
            measured.held = held_nbytes(model)
            with track_memory(job.device) as meter:
                loss = _one(model, optimizer, inputs, targets, measured)
            if step == at:
                _keep(meter, measured)
        else:
            loss = _one(model, optimizer, inputs, targets, None)
        seconds = time.perf_counter() - start
        report = ts.report(model)
        yield Record(
            step, loss, seconds, len(inputs) / seconds,
            None if inputs.is_floating_point() else inputs.numel() / seconds, report.wait_seconds,
            {f"{a.name.lower()} to {b.name.lower()}": n for (a, b), n in report.bytes_moved.items()},
            report.plan.peak_nbytes, measured.peak or None,
        )  # fmt: skip


def _one(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, measured: Measured | None
) -> float:
    begin = time.perf_counter()
    loss = model(inputs, targets)
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
