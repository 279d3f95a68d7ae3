"""``tapestream plan``: would this training step fit that machine, and how fast would it be? Nothing is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from tapestream.cli import checks, show
from tapestream.cli.assumed import assumed_document, by_all, room, speeds
from tapestream.cli.changes import Change, Elsewise, changes_that_fit
from tapestream.cli.compare import compared, print_table
from tapestream.cli.costs import Costs, costs_of
from tapestream.cli.hardware import Hardware
from tapestream.cli.machine import name
from tapestream.cli.remedies import Helping, remedies
from tapestream.cli.replicas import machines, seconds_machines
from tapestream.cli.subject import Subject, subject_of
from tapestream.cli.targets import TargetOptions
from tapestream.cli.where import asked_where, blocks_updated, seconds_where, updates_where
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.loss import Chunks
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.optimizers import checked, refused
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.units import DAY, format_nbytes, format_seconds

_HOMES = {"auto": None, "device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
_KINDS = 3
_SSD_NBYTES = 600e12
"""What a common SSD of 1 TB is sold to endure."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How a step is trained, and how the answer is told. ``where``: blocks are updated, if that was asked for.
    ``suggest``: whether all remedies are tried; ``save``, ``plot``: files that are written."""

    optimizer: str
    update: str
    where: str | None
    home: str
    loss_chunks: Chunks | None
    lora: int | None
    tables: tuple[str, ...]
    suggest: bool
    save: Path | None
    plot: Path | None
    compare: bool
    json: bool


def planned(target: str, wish: TargetOptions, hardware: Hardware, wanted: PlanOptions) -> None:
    """Say whether the step fits. Raises typer.Exit(2) where it does not."""
    if hardware.device == "cpu" and wanted.where is not None:
        checks.no_effect("--where", "--device cpu, where all is updated in RAM")
    checked(wanted.optimizer, wanted.update, asked_where(wanted.where))
    subject = subject_of(target, wish)
    costs = costs_of(subject, hardware.device)
    question = _asked(costs, subject, hardware, wanted)

    def ask(change: Change) -> Question:
        sequence = int(change["--seq"]) if "--seq" in change else wish.sequence
        other = subject_of(target, replace(wish, dtype=change.get("--dtype", wish.dtype), sequence=sequence))
        return _asked(costs_of(other, hardware.device), other, hardware, wanted)

    if wanted.compare:
        _compare(question, subject, costs, hardware, wanted)
    else:
        _answer(question, subject, costs, hardware, wanted, Elsewise(ask, wish.dtype, subject.sequence))


def _asked(costs: Costs, subject: Subject, hardware: Hardware, wanted: PlanOptions) -> Question:
    ranks, on_cpu = hardware.ranks, hardware.device == "cpu"
    where = asked_where(wanted.where)
    return Question(
        costs.outline, subject.batch, checked(wanted.optimizer, wanted.update, where), wanted.update, hardware.device,
        budget=hardware.budget, gpu=hardware.device_nbytes,
        ram=None if on_cpu else hardware.ram.nbytes // ranks.in_one, disk=hardware.disk.nbytes // ranks.in_one,
        home=_HOMES[wanted.home], speeds=hardware.machine, loss_chunks=wanted.loss_chunks,
        lora=wanted.lora, tables=wanted.tables, shards=ranks.shards, in_one=ranks.in_one, where=where,
    )  # fmt: skip


def _answer(
    question: Question, subject: Subject, costs: Costs, hardware: Hardware, wanted: PlanOptions, elsewise: Elsewise
) -> None:
    refusal: BudgetError | None = None
    helping: list[Helping] = []
    options: list[tuple[Change, Answer]] = []
    try:
        found: Answer | None = question.plan()
    except BudgetError as error:
        refusal = error
        options = list(changes_that_fit(question, error, elsewise))
        found = options[0][1] if options else None
    if found is not None and refusal is None:
        helping = remedies(question, found, every=wanted.suggest)
    if found is not None and refusal is None and (wanted.save is not None or wanted.plot is not None):
        _write(found, wanted.save, wanted.plot)
    changes = [_by_option(change, hardware) for change, _ in options]
    document = _document(question, subject, costs, found, refusal, changes, hardware)
    if wanted.where is not None and found is not None and refusal is None:
        document["answer"]["seconds_where"] = seconds_where(question, found)
        document["answer"]["blocks_updated"] = blocks_updated(found)
    if hardware.ranks.may_replicate and found is not None and refusal is None:
        other = _asked(costs, subject, hardware.otherwise(), wanted)
        document["answer"]["seconds_machines"] = seconds_machines(hardware.ranks, found, other)
    larger = (answer for change, answer in options if change.keys() <= {"--budget", "--gpu"})
    document["least_fills"] = next((answer.fills for answer in larger), {})
    document["remedies"] = [_remedy_figures(one, hardware) for one in helping]
    if wanted.json:
        show.as_json(document)
    else:
        _print(question, subject, document, found, refusal, hardware)
        _print_remedies(document, hardware.device, wanted.suggest and refusal is None)
    if refusal is not None:
        raise typer.Exit(2)


def _by_option(change: Change, hardware: Hardware) -> Change:
    """RAM by the option that it was given with."""
    return {hardware.ram_option if option == "--ram" else option: value for option, value in change.items()}


def _compare(question: Question, subject: Subject, costs: Costs, hardware: Hardware, wanted: PlanOptions) -> None:
    title = f"{subject.name}, {subject.step(question.batch)}: {', '.join(speeds(hardware))}"
    found, document = compared(question, wanted.plot, title)
    fastest = found[0].plan
    if fastest is not None and wanted.save is not None:
        _write(fastest, wanted.save, None)
    if wanted.json:
        show.as_json({"model": {"name": subject.name, **costs.facts(question.batch)}, **document})
    else:
        print_table(question, subject, found)
    if fastest is None:
        raise typer.Exit(2)


def _write(found: Answer, save: Path | None, plot: Path | None) -> None:
    if len(found.chains) > 1:
        raise InputError(
            f"--save and --plot are for one plan; this model has {len(found.chains)} chains of blocks, each with its "
            "own plan"
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
    hardware: Hardware,
) -> dict[str, Any]:
    """The answer as JSON; where it does not fit, ``answer`` is that for the first of ``changes``."""
    return {
        "model": {"name": subject.name, **costs.facts(question.batch)},
        "batch": question.batch, "sequence": subject.sequence,
        "optimizer": question.optimizer, "optimizer_refused": refused(question.optimizer),
        "update": question.update, "where": question.where,
        "loss_chunks": question.loss_chunks, "lora": question.lora, "tables": list(question.tables),
        "fits": refusal is None, "reason": None if refusal is None else hardware.told(refusal),
        "least_nbytes": None if refusal is None else refusal.least_nbytes, "changes": changes,
        "budgets": [] if refusal is None else [one._asdict() for one in refusal.budgets],
        "assumed": assumed_document(hardware),
        "answer": None if found is None else _figures(question, subject, found, changes, hardware),
    }  # fmt: skip


def _figures(
    question: Question, subject: Subject, found: Answer, changes: list[Change], hardware: Hardware
) -> dict[str, Any]:
    bounds = found.bounds(hardware.machine)
    change = changes[0] if changes else {}
    samples, sequence = int(change.get("--batch", question.batch)), int(change.get("--seq", subject.sequence or 1))
    a_day = found.written_nbytes * DAY / found.seconds
    return {
        "planner": found.planner, "seconds_per_step": found.seconds, "overhead": found.overhead,
        "waiting_seconds": found.waiting_seconds, "forwards": found.forwards, "moved_nbytes": found.moved_nbytes,
        "bounds": {_bound_name(ends, question.device): seconds for ends, seconds in bounds.items()},
        f"{subject.unit}_per_second": hardware.ranks.count * samples * sequence / found.seconds,
        "tiers": {
            tier.name.lower(): {"peak_nbytes": found.peak_nbytes(tier), "allowed_nbytes": found.allowed_nbytes(tier)}
            for tier in MEMORIES
        },
        "ranks": hardware.ranks.count, "machines": hardware.ranks.machines, "shards": hardware.ranks.shards,
        "ranks_in_a_machine": hardware.ranks.in_one,
        "fills": found.fills,
        "disk_written_nbytes_per_step": found.written_nbytes,
        "disk_written_nbytes_per_day": round(a_day),
        "days_of_a_600_tb_ssd": _SSD_NBYTES / a_day if a_day else None,
    }  # fmt: skip


def _print(
    question: Question,
    subject: Subject,
    document: dict[str, Any],
    found: Answer | None,
    refusal: BudgetError | None,
    hardware: Hardware,
) -> None:
    facts = document["model"]
    width = f" of width {facts['width']}" if "width" in facts else ""
    trains = question.outlined().trains
    how = f"{question.optimizer}, update {question.update}" if trains else "nothing trains"
    show.line(
        f"{subject.name}: {facts['layers']} blocks{width}, {_count(facts['parameters'])} parameters, "
        f"{subject.step(question.batch)}, {how}{_more(question)}"
    )
    if trains and (why := document["optimizer_refused"]) is not None:
        show.line(
            f"ts.optimizer does not take {question.optimizer} ({why}). Made by yourself it is exact; its state is "
            "outside of the budget, and of these numbers."
        )
    if refusal is not None:
        show.line(f"Does not fit: {document['reason']}.", "red")
        if document["least_fills"] and document["least_fills"] != document["answer"]["fills"]:  # which the table shows
            nbytes = sum(document["least_fills"].values())
            show.line(f"The {format_nbytes(nbytes)} that it takes are filled by {_most(document['least_fills'])}.")
        texts = list(map(_text, document["changes"]))
        if not texts:
            show.line("No change makes it fit, nor any amount of the device, RAM and disk; use a smaller model.")
            return
        show.line(f"The least change that fits: {texts[0]}", "bold")
        for text in texts[1:]:
            show.line(f"So does: {text}")
    if found is None:
        return
    title = "With that change" if refusal is not None else "It fits"
    changed = hardware.changed(document["changes"][0]) if refusal is not None else hardware
    show.table(title, _rows(question, subject, document["answer"], changed))
    if refusal is None:
        show.line(str(found))


def _remedy_figures(one: Helping, hardware: Hardware) -> dict[str, Any]:
    """``seconds``: for as many samples as were asked for."""
    peaks = {tier.name.lower(): one.answer.peak_nbytes(tier) for tier in MEMORIES}
    return {"change": _by_option(one.change, hardware), "runs": one.runs, "seconds": one.seconds, "peak_nbytes": peaks}


def _print_remedies(document: dict[str, Any], device: str, asked: bool) -> None:
    """A table, fastest first."""
    rows = [
        (
            _text(found["change"]) + (f", {found['runs']} times" if found["runs"] > 1 else ""),
            format_seconds(found["seconds"]),
            *(format_nbytes(found["peak_nbytes"][tier.name.lower()]) for tier in MEMORIES),
        )
        for found in document["remedies"]
    ]
    if rows:
        tiers = (name(tier, device) for tier in MEMORIES)
        show.table("What would help", rows, ("with", "the same samples take", *tiers))
    elif asked:
        show.line("Nothing that was tried saves more than 1%.")


def _text(change: Change) -> str:
    return " ".join(f"{option} {value}" for option, value in change.items())


def _rows(question: Question, subject: Subject, answer: dict[str, Any], hardware: Hardware) -> list[tuple[str, str]]:
    tiers = ((tier, answer["tiers"][tier.name.lower()]) for tier in MEMORIES)
    seconds, waiting = format_seconds(answer["seconds_per_step"]), format_seconds(answer["waiting_seconds"])
    written, a_day = answer["disk_written_nbytes_per_step"], answer["disk_written_nbytes_per_day"]
    called = name(Tier.DEVICE, question.device)
    return [
        *(
            (name(tier, question.device), _taken(tier, found, question.in_one))
            for tier, found in tiers
            if tier is Tier.DEVICE or found["peak_nbytes"]
        ),
        *([(f"fills {called}", _most(answer["fills"]))] if answer["fills"] else []),
        ("a step", f"{seconds}, {waiting} of it waiting"),
        *([("updates", _updates(question, answer))] if "seconds_where" in answer else []),
        *([("machines", machines(hardware.ranks, answer["seconds_machines"]))] if "seconds_machines" in answer else []),
        ("binds", _binding(answer)),
        (subject.unit, f"{show.number(answer[f'{subject.unit}_per_second'])} a second{by_all(hardware)}"),
        ("written to disk", f"{format_nbytes(written)} a step, {format_nbytes(a_day)} a day{_worn(answer)}"),
        ("assumed", "\n".join((*speeds(hardware, in_ram="seconds_where" in answer), room(hardware)))),
    ]


def _updates(question: Question, answer: dict[str, Any]) -> str:
    updated = answer["blocks_updated"]
    return updates_where(question, answer["seconds_where"], updated["device"], updated["host"])


def _taken(tier: Tier, found: Mapping[str, Any], ranks: int) -> str:
    """What is taken of a tier: by one rank of its device, by all ranks of what a machine has."""
    ranks = 1 if tier is Tier.DEVICE else ranks
    allowed = found["allowed_nbytes"]
    taken = show.share(found["peak_nbytes"] * ranks, None if allowed is None else allowed * ranks)
    return taken if ranks == 1 else f"{taken}, {ranks} ranks together"


def _bound_name(ends: tuple[Tier, Tier] | None, device: str) -> str:
    if ends == (Tier.SHARD, Tier.DEVICE):
        return "copies between ranks"
    if ends == (Tier.HOST, Tier.HOST):
        return "updates in RAM"
    return "computation" if ends is None else " to ".join(name(tier, device) for tier in ends)


def _binding(answer: dict[str, Any]) -> str:
    """What would take longest if all went on at once, and how far from that the step is."""
    what, seconds = max(answer["bounds"].items(), key=lambda one: one[1])
    times = answer["seconds_per_step"] / seconds if seconds else 1.0
    return f"{what}, {format_seconds(seconds)}; a step takes {times:.2f} times that"


def _most(fills: Mapping[str, int]) -> str:
    """The largest kinds of what lies on the device at its peak."""
    return ", ".join(f"{format_nbytes(nbytes)} {what}" for what, nbytes in list(fills.items())[:_KINDS])


def _more(question: Question) -> str:
    """What is not as usual."""
    chunks = "" if question.loss_chunks is None else f", loss in chunks ({question.loss_chunks})"
    looked_up = f", rows of {', '.join(question.tables)} looked up" if question.tables else ""
    return chunks + ("" if question.lora is None else f", LoRA of rank {question.lora}") + looked_up


def _count(numbers: int) -> str:
    for factor, unit in ((10**9, "billion"), (10**6, "million")):
        if numbers >= factor:
            return f"{numbers / factor:.3g} {unit}"
    return f"{numbers:,}"


def _worn(answer: dict[str, Any]) -> str:
    days = answer["days_of_a_600_tb_ssd"]
    return "" if days is None else f"; a 600 TB SSD lasts {show.number(days)} days"
