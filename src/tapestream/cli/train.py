"""``tapestream train``: a byte-level GPT on any text, within a budget."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TextIO

import typer

from tapestream.cli import show
from tapestream.cli.loop import Job, Measured, Record, run, streamed, text_of
from tapestream.cli.options import (
    Batch,
    Budget,
    Data,
    Device,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Layers,
    Model,
    Optimizer,
    Seq,
    Steps,
    Update,
    Width,
    chosen_device,
    make_config,
    reported,
)
from tapestream.errors import StorageError
from tapestream.units import format_nbytes, format_seconds, parse_nbytes

BYTES = 256
"""The vocabulary of text taken as bytes."""


@reported
def train(
    model: Model = "gpt",
    data: Data = "stdlib",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    budget: Budget = None,
    host_budget: HostBudget = None,
    home: Home = "auto",
    folder: Folder = None,
    steps: Steps = 100,
    batch: Batch = 2,
    seq: Seq = 256,
    device: Device = "auto",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate, reached after a tenth of the steps.")] = 3e-4,
    metrics: Annotated[Path, typer.Option(help="One line of JSON per step is written here.")] = Path("metrics.jsonl"),
    json_: Json = False,
) -> None:
    """Train a byte-level GPT on text within a memory budget."""
    config = make_config(model, layers, width, heads, context=seq, vocabulary=BYTES)
    job = Job(
        config, data, batch, seq, steps, rate, max(1, steps // 10), optimizer, update, chosen_device(device),
        budget, host_budget, home, None if folder is None else str(folder),
    )  # fmt: skip
    allowed = None if budget is None else parse_nbytes(budget)
    text = text_of(data)
    records: list[Record] = []
    with writing(metrics) as lines, show.progress() as advance:
        streamed_model, optimizer_ = streamed(job, lambda what, done, total: advance(what, done, total, ""))
        for record in run(job, streamed_model, optimizer_, text, Measured()):
            lines.write(json.dumps(asdict(record)) + "\n")
            lines.flush()
            records.append(record)
            advance("training", record.step + 1, steps, remark(record, allowed))
    first, last = records[0], records[-1]
    if json_:
        show.as_json({"job": job.to_json(), "first": asdict(first), "last": asdict(last), "metrics": str(metrics)})
    else:
        show.line(f"loss {first.loss:.3f} -> {last.loss:.3f} in {len(records)} steps; each step is in {metrics}")


def writing(path: Path) -> TextIO:
    """An open file; raises StorageError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise StorageError(error.errno, f"cannot write {path}: {error.strerror}; give another place") from error


def remark(record: Record, allowed: int | None) -> str:
    """What a progress bar says after a step."""
    peak = record.measured_peak_nbytes or record.planned_peak_nbytes
    how = "measured" if record.measured_peak_nbytes else "planned"
    limit = "" if allowed is None else f" of {format_nbytes(allowed)}"
    return (
        f"loss {record.loss:.3f}  {record.tokens_per_second:.0f} tokens/s  {format_nbytes(peak)}{limit} ({how})  "
        f"moved {format_nbytes(sum(record.moved_nbytes.values()))}  waited {format_seconds(record.waiting_seconds)}"
    )
