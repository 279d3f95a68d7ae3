"""The options of ``tapestream train``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli.ends import importing, reported
from tapestream.cli.options import (
    Batch,
    Budget,
    Classes,
    Data,
    Device,
    Dtype,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Model,
    Optimizer,
    Seed,
    Seq,
    Size,
    Steps,
    TrainedLayers,
    TrainedWidth,
    Update,
    Workers,
)

_METRICS = "File for one line of JSON per step; that of an earlier run is kept beside it, as metrics-1.jsonl."


@reported
def train(
    model: Model = "gpt",
    data: Data = None,
    layers: TrainedLayers = None,
    width: TrainedWidth = None,
    heads: Heads = None,
    budget: Budget = None,
    host_budget: HostBudget = None,
    home: Home = "auto",
    folder: Folder = None,
    steps: Steps = 100,
    batch: Batch = None,
    seq: Seq = None,
    size: Size = None,
    classes: Classes = None,
    workers: Workers = None,
    dtype: Dtype = "fp32",
    device: Device = "auto",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate, reached after a tenth of the steps.")] = 3e-4,
    seed: Seed = 0,
    metrics: Annotated[Path, typer.Option(help=_METRICS)] = Path("metrics.jsonl"),
    saves: Annotated[Path | None, typer.Option(help="Folder for saves of the run; the last two are kept.")] = None,
    save_every: Annotated[int, typer.Option(min=0, help="Steps between saves; 0: only at the end or at a signal.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last save.")] = False,
    json_: Json = False,
) -> None:
    """Train a byte-level GPT, a ResNet or a DRANet within a memory budget.

    With --saves, Ctrl-C, SIGTERM and data that cannot be used end the run after a save; SIGUSR1 saves and goes on.
    """
    from tapestream.cli.train_options import NetworkOptions, TrainingOptions, check_network

    asked = TrainingOptions(
        budget, host_budget, home, folder, steps, dtype, device, optimizer, update, rate, seed, metrics, saves,
        save_every, resume, json_,
    )  # fmt: skip
    asked.check()
    wanted = NetworkOptions(model, data, layers, width, heads, batch, seq, size, classes, workers)
    check_network(wanted)
    with importing():
        from tapestream.cli.train import trained
    trained(wanted, asked)
