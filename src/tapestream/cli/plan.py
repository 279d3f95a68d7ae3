"""``tapestream plan``: would this training step fit that machine, and how fast would it be? Nothing is allocated."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from tapestream.cli import show
from tapestream.cli.machine import name
from tapestream.cli.options import (
    Batch,
    Budget,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Layers,
    Model,
    Optimizer,
    Seq,
    Update,
    Width,
    make_config,
    reported,
)
from tapestream.cli.question import Change, Question, changes_that_fit
from tapestream.errors import BudgetError, InputError
from tapestream.ir.actions import Tier
from tapestream.planning.plan import Plan
from tapestream.units import format_nbytes, format_seconds, parse_nbytes, parse_rate

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HOMES = {"auto": None, "device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
_DAY = 86400


@reported
def plan(
    model: Model = "gpt",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    seq: Seq = 2048,
    batch: Batch = 1,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Tokens known; by default GPT-2's 50257.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16 (with fp32 masters).")] = "fp32",
    optimizer: Optimizer = "adamw",
    update: Update = "step",
    device: Annotated[str, typer.Option(help="cuda, or cpu: no GPU, RAM is the device.")] = "cuda",
    budget: Budget = None,
    gpu: Annotated[str | None, typer.Option(help="Memory that the GPU has.")] = None,
    host_budget: HostBudget = None,
    ram: Annotated[str | None, typer.Option(help="RAM that there is; by default this machine's.")] = None,
    disk: Annotated[str | None, typer.Option(help="Free disk; by default that of --folder, else no limit.")] = None,
    home: Home = "auto",
    folder: Folder = None,
    link: Annotated[str, typer.Option(help="RAM to GPU and back, each way.")] = "25GB/s",
    disk_read: Annotated[str, typer.Option(help="Reading the disk.")] = "3GB/s",
    disk_write: Annotated[str, typer.Option(help="Writing the disk.")] = "2GB/s",
    flops: Annotated[float | None, typer.Option(help="FLOP/s reached; by default 1e14, on cpu 1e11.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan here (.png, .pdf, .svg).")] = None,
    json_: Json = False,
) -> None:
    """Say whether a training step fits, what it takes in each tier and how long. Exit status 2: it does not fit."""
    if dtype not in _DTYPES or home not in _HOMES or device not in ("cpu", "cuda"):
        raise InputError(
            f"--dtype {dtype} --home {home} --device {device} was asked for; --dtype is fp32 or bf16, "
            "--home auto, device, host or disk, --device cuda or cpu"
        )
    allowed = budget or gpu or (ram if device == "cpu" else None)
    if allowed is None:
        raise InputError("how much may the step take? Add --budget, for example --budget 12GiB")
    config = make_config(
        model,
        layers,
        width,
        heads,
        context=None if model != "gpt" else seq,
        vocabulary=vocabulary,
        dtype=_DTYPES[dtype],
    )
    room = host_budget or ram
    question = Question(
        config, batch, seq, optimizer, update, device,
        budget=parse_nbytes(allowed),
        gpu=parse_nbytes(gpu) if gpu else None,
        ram=parse_nbytes(room) if room else psutil.virtual_memory().total,
        disk=parse_nbytes(disk) if disk else _free(folder),
        home=_HOMES[home],
        link=parse_rate(link),
        disk_read=parse_rate(disk_read),
        disk_write=parse_rate(disk_write),
        flops=flops or (1e14 if device == "cuda" else 1e11),
    )  # fmt: skip
    _answer(question, model, save, plot, json_)


def _free(folder: Path | None) -> int | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise InputError(f"--folder {folder} was asked for, but there is no such folder; create it or give --disk 2TB")
    return shutil.disk_usage(folder).free


def _answer(question: Question, model: str, save: Path | None, plot: Path | None, json_: bool) -> None:
    refusal: BudgetError | None = None
    options: list[tuple[Change, Plan]] = []
    try:
        found: Plan | None = question.plan()
    except BudgetError as error:
        refusal = error
        options = list(changes_that_fit(question, error))
        found = options[0][1] if options else None
    if found is not None and refusal is None:
        if save is not None:
            found.save(save)
        if plot is not None:
            found.plot(plot)
    if json_:
        show.as_json(_document(question, model, found, refusal, [change for change, _ in options]))
    else:
        _print(question, model, found, refusal, [change for change, _ in options])
    if refusal is not None:
        raise typer.Exit(2)


def written_nbytes(found: Plan) -> int:
    """Bytes written to the disk in one step."""
    return sum(n for (_, target), n in found.simulation.bytes_moved.items() if target is Tier.DISK)


def _document(
    question: Question, model: str, found: Plan | None, refusal: BudgetError | None, changes: list[Change]
) -> dict[str, Any]:
    """The answer as JSON; where it does not fit, ``answer`` is that for the first of ``changes``."""
    config = question.config
    document: dict[str, Any] = {
        "model": {
            "name": model, "layers": config.layers, "width": config.width, "heads": config.heads,
            "vocabulary": config.vocabulary, "parameters": config.parameters,
            "dtype": str(config.dtype).removeprefix("torch."),
        },
        "batch": question.batch, "sequence": question.sequence,
        "optimizer": question.optimizer, "update": question.update,
        "fits": refusal is None, "reason": None if refusal is None else str(refusal), "changes": changes,
        "answer": None,
    }  # fmt: skip
    if found is not None:
        written = written_nbytes(found)
        tokens = question.batch * question.sequence
        if refusal is not None and "--batch" in changes[0]:
            tokens = int(changes[0]["--batch"]) * question.sequence
        document["answer"] = {
            "planner": found.planner, "seconds_per_step": found.seconds, "overhead": found.overhead,
            "waiting_seconds": found.simulation.stall_seconds, "tokens_per_second": tokens / found.seconds,
            "tiers": {
                tier.name.lower(): {
                    "peak_nbytes": found.simulation.peak_nbytes[tier], "allowed_nbytes": found.budget.nbytes(tier),
                }
                for tier in Tier
            },
            "disk_written_nbytes_per_step": written,
            "disk_written_nbytes_per_day": round(written * _DAY / found.seconds),
        }  # fmt: skip
    return document


def _print(
    question: Question, model: str, found: Plan | None, refusal: BudgetError | None, changes: list[Change]
) -> None:
    config = question.config
    show.line(
        f"{model}: {config.layers} blocks of width {config.width}, {config.parameters / 1e9:.3g} billion parameters, "
        f"{question.batch} x {question.sequence} tokens, {question.optimizer}, update {question.update}"
    )
    if refusal is not None:
        show.line(f"Does not fit: {refusal}.", "red")
        texts = [" ".join(f"{option} {value}" for option, value in change.items()) for change in changes]
        if not texts:
            show.line(
                "No change of --update, --batch, --budget, --gpu, --ram or --disk was found that makes it fit; "
                "use a smaller model."
            )
            return
        show.line(f"The least change that fits: {texts[0]}", "bold")
        for text in texts[1:]:
            show.line(f"So does: {text}")
    if found is None:
        return
    answer = _document(question, model, found, refusal, changes)["answer"]
    device = question.device
    title = "With that change (one planner tried, not the fastest)" if refusal is not None else "It fits"
    rows = [
        (name(tier, device), show.share(found.simulation.peak_nbytes[tier], found.budget.nbytes(tier)))
        for tier in Tier
        if tier is Tier.DEVICE or found.simulation.peak_nbytes[tier]
    ]
    written = answer["disk_written_nbytes_per_step"]
    rows += [
        ("a step", f"{format_seconds(found.seconds)}, {format_seconds(found.simulation.stall_seconds)} of it waiting"),
        ("tokens", f"{show.number(answer['tokens_per_second'])} a second"),
        (
            "written to disk",
            f"{format_nbytes(written)} a step, {format_nbytes(answer['disk_written_nbytes_per_day'])} a day",
        ),
        ("assumed", _assumed(question)),
    ]
    show.table(title, rows)
    if refusal is None:
        show.line(str(found))


def _assumed(question: Question) -> str:
    link = f"link {show.rate(question.link)}, " if question.device == "cuda" else ""
    disk = f"disk {show.rate(question.disk_read)} in, {show.rate(question.disk_write)} out"
    return f"{link}{disk}, {show.flops(question.flops)}"
