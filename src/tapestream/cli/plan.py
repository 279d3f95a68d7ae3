"""``tapestream plan``: would this training step fit that machine, and how fast would it be? Nothing is allocated."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tapestream.cli import show
from tapestream.cli.answer import Answer
from tapestream.cli.compare import compared, print_table
from tapestream.cli.costs import Costs, costs_of
from tapestream.cli.machine import name
from tapestream.cli.options import (
    Blocks,
    Budget,
    Dtype,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Layers,
    Optimizer,
    Samples,
    Target,
    Tokens,
    Update,
    Vocabulary,
    Width,
    reported,
)
from tapestream.cli.question import Change, Question, changes_that_fit
from tapestream.cli.subject import Subject, Wish, subject_of
from tapestream.errors import BudgetError, InputError
from tapestream.ir.actions import Tier
from tapestream.planning.picture import check_file, check_picture
from tapestream.units import DAY, format_nbytes, format_seconds, parse_flops, parse_nbytes, parse_rate

_HOMES = {"auto": None, "device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}


@reported
def plan(
    target: Target = "gpt",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    seq: Tokens = None,
    batch: Samples = None,
    vocabulary: Vocabulary = None,
    dtype: Dtype = "fp32",
    blocks: Blocks = None,
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
    flops: Annotated[str | None, typer.Option(help="Reached; by default 100TFLOP/s, on cpu 100GFLOP/s.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the plan here, with --compare the trade-off (.png, .pdf, .svg).")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show what every planner makes of the step.")] = False,
    json_: Json = False,
) -> None:
    """Say whether a training step fits, what it takes in each tier and how long. Exit status 2: it does not fit."""
    if home not in _HOMES or device not in ("cpu", "cuda"):
        raise InputError(
            f"--home {home} --device {device} was asked for; --home is auto, device, host or disk, --device cuda or cpu"
        )
    allowed = budget or gpu or (ram if device == "cpu" else None)
    if allowed is None:
        raise InputError("how much may the step take? Add --budget, for example --budget 12GiB")
    _check_places(save, plot)
    subject = subject_of(target, Wish(layers, width, heads, vocabulary, batch, seq, dtype, tuple(blocks or ())))
    costs = costs_of(subject, device)
    room = host_budget or ram
    question = Question(
        costs.outline, subject.batch, optimizer, update, device,
        budget=parse_nbytes(allowed),
        gpu=parse_nbytes(gpu) if gpu else None,
        ram=parse_nbytes(room) if room else psutil.virtual_memory().total,
        disk=parse_nbytes(disk) if disk else _free(folder),
        home=_HOMES[home],
        link=_rate("--link", link),
        disk_read=_rate("--disk-read", disk_read),
        disk_write=_rate("--disk-write", disk_write),
        flops=_flops(("100T" if device == "cuda" else "100G") if flops is None else flops),
    )  # fmt: skip
    if compare:
        _compare(question, subject, costs, save, plot, json_)
    else:
        _answer(question, subject, costs, save, plot, json_)


def _check_places(save: Path | None, plot: Path | None) -> None:
    """Before the work whose results they are for."""
    if save is not None:
        check_file(save)
    if plot is not None:
        check_picture(plot)


def _rate(option: str, text: str) -> float:
    """Bytes per second; a number too small to be meant so is asked for its unit."""
    rate = parse_rate(text)
    if rate < 1e6 and text.strip()[-1].isdigit():
        raise InputError(f"{option} {text} was asked for: that is {text} bytes a second; if GB/s are meant, {text}GB/s")
    return rate


def _flops(text: str) -> float:
    flops = parse_flops(text)
    if flops < 1e9 and text.strip()[-1].isdigit():
        raise InputError(f"--flops {text} was asked for, less than 1e9 FLOP/s; if TFLOP/s are meant, {text}T")
    return flops


def _free(folder: Path | None) -> int | None:
    if folder is None:
        return None
    if not folder.is_dir():
        raise InputError(f"--folder {folder} was asked for, but there is no such folder; create it or give --disk 2TB")
    return shutil.disk_usage(folder).free


def _answer(
    question: Question, subject: Subject, costs: Costs, save: Path | None, plot: Path | None, json_: bool
) -> None:
    refusal: BudgetError | None = None
    options: list[tuple[Change, Answer]] = []
    try:
        found: Answer | None = question.plan()
    except BudgetError as error:
        refusal = error
        options = list(changes_that_fit(question, error))
        found = options[0][1] if options else None
    if found is not None and refusal is None and (save is not None or plot is not None):
        _write(found, save, plot)
    changes = [change for change, _ in options]
    document = _document(question, subject, costs, found, refusal, changes)
    if json_:
        show.as_json(document)
    else:
        _print(question, subject, document, found, refusal)
    if refusal is not None:
        raise typer.Exit(2)


def _compare(
    question: Question, subject: Subject, costs: Costs, save: Path | None, plot: Path | None, json_: bool
) -> None:
    found, document = compared(question, plot, f"{subject.name}, {subject.step(question.batch)}: {_assumed(question)}")
    fastest = found[0].plan
    if fastest is not None and save is not None:
        _write(fastest, save, None)
    if json_:
        show.as_json({"model": {"name": subject.name, **costs.facts(question.batch)}, **document})
    else:
        print_table(question, subject, found)
    if fastest is None:
        raise typer.Exit(2)


def _write(found: Answer, save: Path | None, plot: Path | None) -> None:
    if len(found.chains) > 1:
        raise InputError(
            f"--save and --plot are for one plan; this model has {len(found.chains)} chains of blocks, each with its "
            "own"
        )
    if save is not None:
        found.chains[0].save(save)
    if plot is not None:
        found.chains[0].plot(plot)


def _document(
    question: Question,
    subject: Subject,
    costs: Costs,
    found: Answer | None,
    refusal: BudgetError | None,
    changes: list[Change],
) -> dict[str, Any]:
    """The answer as JSON; where it does not fit, ``answer`` is that for the first of ``changes``."""
    return {
        "model": {"name": subject.name, **costs.facts(question.batch)},
        "batch": question.batch, "sequence": subject.sequence,
        "optimizer": question.optimizer, "update": question.update,
        "fits": refusal is None, "reason": None if refusal is None else str(refusal),
        "least_nbytes": None if refusal is None else refusal.least_nbytes, "changes": changes,
        "answer": None if found is None else _figures(question, subject, found, changes),
    }  # fmt: skip


def _figures(question: Question, subject: Subject, found: Answer, changes: list[Change]) -> dict[str, Any]:
    samples = int(changes[0].get("--batch", question.batch)) if changes else question.batch
    return {
        "planner": found.planner, "seconds_per_step": found.seconds, "overhead": found.overhead,
        "waiting_seconds": found.waiting_seconds,
        f"{subject.unit}_per_second": samples * (subject.sequence or 1) / found.seconds,
        "tiers": {
            tier.name.lower(): {"peak_nbytes": found.peak_nbytes(tier), "allowed_nbytes": found.allowed_nbytes(tier)}
            for tier in Tier
        },
        "disk_written_nbytes_per_step": found.written_nbytes,
        "disk_written_nbytes_per_day": round(found.written_nbytes * DAY / found.seconds),
    }  # fmt: skip


def _print(
    question: Question,
    subject: Subject,
    document: dict[str, Any],
    found: Answer | None,
    refusal: BudgetError | None,
) -> None:
    facts = document["model"]
    width = f" of width {facts['width']}" if "width" in facts else ""
    show.line(
        f"{subject.name}: {facts['layers']} blocks{width}, {_count(facts['parameters'])} parameters, "
        f"{subject.step(question.batch)}, {question.optimizer}, update {question.update}"
    )
    if refusal is not None:
        show.line(f"Does not fit: {refusal}.", "red")
        texts = [" ".join(f"{option} {value}" for option, value in change.items()) for change in document["changes"]]
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
    title = "With that change (one planner tried, not the fastest)" if refusal is not None else "It fits"
    show.table(title, _rows(question, subject, document["answer"]))
    if refusal is None:
        show.line(str(found))


def _rows(question: Question, subject: Subject, answer: dict[str, Any]) -> list[tuple[str, str]]:
    tiers = ((tier, answer["tiers"][tier.name.lower()]) for tier in Tier)
    seconds, waiting = format_seconds(answer["seconds_per_step"]), format_seconds(answer["waiting_seconds"])
    written, a_day = answer["disk_written_nbytes_per_step"], answer["disk_written_nbytes_per_day"]
    return [
        *(
            (name(tier, question.device), show.share(found["peak_nbytes"], found["allowed_nbytes"]))
            for tier, found in tiers
            if tier is Tier.DEVICE or found["peak_nbytes"]
        ),
        ("a step", f"{seconds}, {waiting} of it waiting"),
        (subject.unit, f"{show.number(answer[f'{subject.unit}_per_second'])} a second"),
        ("written to disk", f"{format_nbytes(written)} a step, {format_nbytes(a_day)} a day"),
        ("assumed", _assumed(question)),
    ]


def _count(numbers: int) -> str:
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if numbers >= factor:
            return f"{numbers / factor:.3g} {unit}"
    return f"{numbers:,}"


def _assumed(question: Question) -> str:
    link = f"link {show.rate(question.link)}, " if question.device == "cuda" else ""
    disk = f"disk {show.rate(question.disk_read)} in, {show.rate(question.disk_write)} out"
    return f"{link}{disk}, {show.flops(question.flops)}"
