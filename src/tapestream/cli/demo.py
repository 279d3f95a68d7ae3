"""``tapestream demo``: train under a hard memory limit in which plain PyTorch fails, and show what happened."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
import typer

from tapestream.cli import show
from tapestream.cli.changes import refusal
from tapestream.cli.children import child
from tapestream.cli.chosen import chosen_device
from tapestream.cli.costs import costs_of
from tapestream.cli.loop import Job, Record
from tapestream.cli.picture import draw_memory
from tapestream.cli.subject import Arguments, Subject
from tapestream.cli.train import remark, writing
from tapestream.cli.train_options import BYTES
from tapestream.costs import Machine
from tapestream.costs.machine import usual_links
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import Tier
from tapestream.models import GPT, GPTConfig
from tapestream.planning.auto import make_plan
from tapestream.system.limits import data_can_be_limited
from tapestream.units import format_nbytes, format_seconds, parse_nbytes

ALLOWANCE = 64 * 2**20
"""Bytes beside the budget that a child may take for Python objects, thread stacks and what malloc cannot give back."""
_COMPARED_STEPS = 3


def shown(quick: bool, device: str, budget: str | None, out: Path) -> None:
    """Train a GPT under a hard memory limit in which plain PyTorch fails. Raises typer.Exit(1) for what went wrong."""
    home = out / "home"
    job = _job(quick, chosen_device(device), budget, home)
    check_budget(job)
    with removing(home), writing(out / "metrics.jsonl") as lines:
        story = _play(job, lines, compared=_COMPARED_STEPS if quick else 0)
    _close(job, story, out)
    if story.problems:
        for problem in story.problems:
            show.failure(problem)
        raise typer.Exit(1)


def _job(quick: bool, device: str, budget: str | None, home: Path) -> Job:
    shape = (8, 512, 8) if quick else (24, 1024, 16)
    config = GPTConfig(*shape, vocabulary=BYTES, context=256)
    return Job(
        config, "stdlib", batch=2, sequence=128 if quick else 256, steps=6 if quick else 20,
        rate=1e-3 if quick else 1.5e-4, warmup=10 if quick else 5, optimizer="adamw", update="backward", device=device,
        budget=budget or ("96MiB" if quick else "1GiB"), host_budget=None, home="disk", folder=str(home),
    )  # fmt: skip


def check_budget(job: Job) -> None:
    """Raise BudgetError for a budget within which the demo cannot train: under the hard limit that comes with it, a
    child would fail in the midst of some allocation. InputError where the system has no such limit."""
    if job.device == "cpu" and not data_can_be_limited():
        raise InputError(
            "the demo sets a hard limit on a process's memory, which on the CPU only Linux has; use --device cuda, or "
            "`tapestream train`, which keeps to a budget without one"
        )
    config, allowed = job.config, parse_nbytes(job.budget or 0)
    assert isinstance(config, GPTConfig)

    def arguments(batch: int) -> Arguments:
        return tuple(torch.zeros(batch, job.sequence, dtype=torch.int64) for _ in range(2)), {}

    subject = Subject("the demo", lambda: GPT(config), arguments, job.batch, job.sequence, config)
    costs = costs_of(subject, job.device)
    speeds = Machine(usual_links(job.device, link=1e9, read=1e9, write=1e9), 1e11)  # of no account for what fits
    missing = refusal(
        Question(
            costs.outline, job.batch, job.optimizer, job.update, job.device, budget=allowed, gpu=None, ram=None,
            disk=None, home=Tier.DISK, speeds=speeds,
        )
    )  # fmt: skip
    if missing is not None and missing.least_nbytes is not None:
        least = -(-missing.least_nbytes // 2**20)
        raise BudgetError(
            f"--budget {job.budget} was asked for; the demo's model needs at least {least}MiB: --budget {least}MiB",
            least_nbytes=missing.least_nbytes,
        )


@dataclass(slots=True)
class Story:
    """What happened."""

    records: list[Record] = field(default_factory=list)
    limit: dict[str, int] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _play(job: Job, lines: TextIO, compared: int) -> Story:
    story, config = Story(), job.config
    assert isinstance(config, GPTConfig)
    show.line(
        f"GPT of {config.layers} blocks of width {config.width}, {config.parameters / 1e6:.0f} million parameters, "
        f"AdamW, {job.batch} x {job.sequence} bytes of Python's standard library a step"
    )
    plain = plain_nbytes(job)
    show.line(
        f"With everything stored, a step takes {format_nbytes(plain)}; the budget is "
        f"{format_nbytes(parse_nbytes(job.budget or 0))}."
    )
    show.line("1. plain PyTorch in a process that may take the budget and no more", "bold")
    _try_plain(job, story)
    show.line("2. tapestream under the same limit", "bold")
    _train(job, story, lines, compared)
    if compared and not story.problems:
        show.line(f"3. plain PyTorch without a limit, {compared} steps, compared bit for bit", "bold")
        _compare(job, story, compared)
    return story


def _try_plain(job: Job, story: Story) -> None:
    with child("plain", replace(job, steps=2), allowance=ALLOWANCE) as messages:
        for message in messages:
            if message["kind"] == "limited":
                _say_limit(message)
            elif message["kind"] == "out of memory":
                show.line(f"   failed, as expected: {message['error']}")
                return
    story.problems.append(
        "Plain PyTorch did not fail within the limit, so this run shows nothing; use a smaller --budget."
    )


def _say_limit(message: dict[str, Any]) -> None:
    limit, taken, budget, allowance = (format_nbytes(message[key]) for key in ("limit", "taken", "budget", "allowance"))
    show.line(
        f"   limit {limit} = {taken} that Python and PyTorch take once started + budget {budget} + {allowance} for "
        "Python objects and threads"
    )


def _train(job: Job, story: Story, lines: TextIO, compared: int) -> None:
    allowed = parse_nbytes(job.budget or 0)
    with (
        show.progress() as advance,
        child("stream", job, allowance=ALLOWANCE, compared=compared) as messages,
    ):
        for message in messages:
            kind = message.pop("kind")
            if kind == "limited":
                _say_limit(message)
            elif kind == "progress":
                advance(message["what"], message["done"], message["total"], "")
            elif kind == "step":
                record = Record(**message)
                story.records.append(record)
                lines.write(json.dumps(record.to_json()) + "\n")
                lines.flush()
                advance("training", record.step + 1, job.steps, remark(record, allowed))
            elif kind == "digest":
                story.digests["tapestream"] = message
            elif kind == "end":
                story.end = message
    losses = [record.loss for record in story.records]
    if not losses or losses[-1] > 0.9 * losses[0]:
        story.problems.append("The loss did not fall by a tenth; please report this with the output above.")


def _compare(job: Job, story: Story, compared: int) -> None:
    with child("reference", replace(job, steps=compared), compared=compared) as messages:
        for message in messages:
            if message.pop("kind") == "digest":
                story.digests["plain"] = message
    ours, plain = story.digests["tapestream"], story.digests["plain"]
    differing = [name for name, digest in plain["digests"].items() if ours["digests"].get(name) != digest]
    if differing or ours["losses"] != plain["losses"]:
        story.problems.append(f"Not equal to plain PyTorch: {', '.join(differing[:3]) or 'the losses'} differ.")
    else:
        show.line(f"   equal: {compared} losses and all {len(plain['digests'])} parameters, every bit")


def plain_nbytes(job: Job) -> int:
    """What plain PyTorch needs for a step, computed: parameters, gradients, optimizer state, and the whole tape."""
    assert isinstance(job.config, GPTConfig)
    with torch.device("meta"):
        model, tokens = GPT(job.config), torch.zeros(job.batch, job.sequence, dtype=torch.int64)
    # As for update="backward": in plain PyTorch each gradient stays where it was made.
    (profile,) = outline(model, (tokens, tokens), moves=False).profiles(
        rates=usual_rates(job.device), optimizer=job.optimizer, update="backward", home=Tier.DEVICE
    )
    return make_plan(profile, planner="store_all", update="step", home=Tier.DEVICE).peak_nbytes


def _close(job: Job, story: Story, out: Path) -> None:
    if not story.end:
        return
    records, end = story.records, story.end
    steady = records[3:] or records  # the first makes the plan, the next two are metered
    seconds = sum(record.seconds for record in steady) / len(steady)
    waiting = sum(record.waiting_seconds for record in steady) / len(steady)
    moved = steady[-1].moved_nbytes
    budget, plain = parse_nbytes(job.budget or 0), plain_nbytes(job)
    lanes = (f"{format_nbytes(nbytes)} {lane.replace('device', 'RAM')}" for lane, nbytes in moved.items())
    show.table(
        "What happened",
        [
            ("budget", format_nbytes(budget)),
            ("peak, simulated", show.share(end["simulated_peak"], budget)),
            ("peak, measured (step 3)", show.share(end["measured"]["peak"], budget)),
            ("plain PyTorch needs", f"{format_nbytes(plain)} (computed), {plain / budget:.1f} times the budget"),
            ("a step", f"{format_seconds(seconds)}, {waiting / seconds:.1%} of it waiting for the disk"),
            ("moved a step", ", ".join(lanes)),
            ("tokens", f"{job.batch * job.sequence / seconds:.0f} a second"),
            ("loss", f"{records[0].loss:.3f} -> {records[-1].loss:.3f} in {len(records)} steps"),
        ],
    )  # fmt: skip
    with writing(out / "step.json") as file:
        json.dump(end, file)
    try:
        draw_memory(out / "memory.png", end, budget)
        show.line(f"Written: {out / 'memory.png'} (memory over one step), {out / 'metrics.jsonl'} (every step)")
    except InputError as error:
        show.line(f"Written: {out / 'metrics.jsonl'} (every step). {error}")
    if end["measured"]["peak"] > budget:
        story.problems.append("The measured peak is above the budget; please report this with the output above.")


@contextmanager
def removing(home: Path) -> Iterator[None]:
    """The folder is gone afterwards, whatever happens, if it was not there before."""
    if home.exists() and any(home.iterdir()):
        raise InputError(f"{home} is not empty; remove what is in it, or choose another folder with --out")
    try:
        yield
    finally:
        with suppress(OSError):
            shutil.rmtree(home)
