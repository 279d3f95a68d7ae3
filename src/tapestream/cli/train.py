"""``tapestream train``: a GPT on text, a ResNet on images, a DRANet on masks, within a budget."""

import contextlib
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import typer

from tapestream.cli import show
from tapestream.cli.checks import check_homes
from tapestream.cli.chosen import chosen_device
from tapestream.cli.data import batches_of, check_fits, task_of
from tapestream.cli.loop import Job, Measured, Record, run, streamed
from tapestream.cli.saving import Saver
from tapestream.cli.train_options import NetworkOptions, TrainingOptions
from tapestream.errors import InputError, StorageError
from tapestream.frontends.available import free_nbytes
from tapestream.system.locks import lock_open
from tapestream.units import format_nbytes, format_seconds, parse_nbytes


def trained(wanted: NetworkOptions, asked: TrainingOptions) -> None:
    """Train. Raises typer.Exit where a signal ended it."""
    chosen = chosen_device(asked.device)
    check_homes(chosen, asked.home, asked.folder, asked.host_budget)
    task = task_of(wanted)
    steps, metrics, resume = asked.steps, asked.metrics, asked.resume
    job = Job(
        task.config, task.data, task.batch, task.length, steps, asked.rate, max(1, steps // 10), asked.optimizer,
        asked.update, chosen, asked.budget, asked.host_budget, asked.home,
        None if asked.folder is None else str(asked.folder), asked.seed, asked.dtype,
    )  # fmt: skip
    allowed = None if asked.budget is None else parse_nbytes(asked.budget)
    check_fits(job, free_nbytes(torch.device(job.device)) if allowed is None else allowed)
    batches = batches_of(job, wanted.workers or 0)
    saver = Saver(asked.saves, asked.save_every, job)
    records: list[Record] = []
    with saver.alone(resume=resume), saver.listening(), show.progress() as advance:
        job, done = saver.begin(resume=resume)
        with writing(metrics, append=True) as lines:
            saver.check_metrics(metrics, lines)
            earlier = None if done else place_of_earlier(metrics, lines)
            net, rule = streamed(job, progress := partial(_advanced, advance))
            saver.holds({"model": net, "optimizer": rule, "batches": batches}, progress, load=resume)
            for record in run(job, net, rule, saver.guarding(batches), Measured(), first=done):
                told = _told(lines, record, done, metrics, earlier, saver)
                records.append(record)
                advance("training", record.step + 1, steps, remark(record, allowed))
                if not saver.after(record.step + 1, last=record.step + 1 == steps, told=told):
                    break
    last = _ended(job, records, metrics, earlier, asked.json)
    if saver.stopped_by is not None and last < steps:
        show.line(f"stopped and saved after step {last} of {steps}; go on with --resume")
        raise typer.Exit(128 + saver.stopped_by)


def _told(lines: TextIO, record: Record, first: int, metrics: Path, earlier: Path | None, saver: Saver) -> str:
    """`tell`. Raises StorageError where the disk is full, say, when what has been done is saved."""
    try:
        return tell(lines, record, first, earlier)
    except OSError as error:
        with contextlib.suppress(OSError):
            lines.close()
        what = f"cannot write {metrics}: {error.strerror or error}; make room, or give another place"
        raise StorageError(saver.lost(what, record.step + 1)) from error


def _ended(job: Job, records: Sequence[Record], metrics: Path, earlier: Path | None, json_: bool) -> int:
    """Say how it went; how many steps have been taken."""
    first, last = records[0], records[-1]
    if json_:
        show.as_json(
            {
                "job": job.to_json(), "first": first.to_json(), "last": last.to_json(), "metrics": str(metrics),
                "earlier_metrics": None if earlier is None else str(earlier),
            }
        )  # fmt: skip
    else:
        show.line(f"loss {first.loss:.3f} -> {last.loss:.3f} in {len(records)} steps; each step is in {metrics}")
        if earlier is not None:
            show.line(f"the steps of an earlier run, found there, are in {earlier}")
    if not math.isfinite(last.loss):
        since = max((record.step + 1 for record in records if math.isfinite(record.loss)), default=first.step)
        show.warning(f"the loss has not been finite since step {since}; is --rate {job.rate:g} too high?")
    return last.step + 1


def _advanced(advance: show.Advance, what: str, done: int, total: int) -> None:
    advance(what, done, total, "")


def writing(path: Path, *, append: bool = False) -> TextIO:
    """An open file, of which what is there is kept with ``append``, if these are metrics.

    Raises InputError where they are something else, which a run would remove, StorageError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append and path.is_file() and not _are_metrics(path):
            raise InputError(
                f"--metrics {path} exists and is no metrics file of `tapestream train`, which would overwrite it; name "
                "another file"
            )
        lines = path.open("a+" if append else "w", encoding="utf-8")
        try:
            lock_open(lines, path)
        except BlockingIOError as error:
            lines.close()
            raise StorageError(f"--metrics {path} is being written by another run; name another file") from error
        except OSError:  # it is written all the same where the file system has no locks
            pass
        return lines
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}; give another place") from error


def _are_metrics(path: Path) -> bool:
    """Whether every line is about a step, but for the last one of a run that was killed, which may be cut short."""
    begun = b'{"step": '
    with path.open("rb") as lines:
        for line in iter(lambda: lines.readline(2**16), b""):
            cut_short = not line.endswith(b"\n") and (line.startswith(begun) or begun.startswith(line))
            if not cut_short and not _is_record(line):
                return False
    return True


def _is_record(line: bytes) -> bool:
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and {"step", "loss", "planned_peak_nbytes"} <= found.keys()


def place_of_earlier(path: Path, lines: TextIO) -> Path | None:
    """Where the steps of an earlier run go that a new one finds in its file of metrics; None if there are none."""
    lines.seek(0)
    if not lines.readline().endswith("\n"):
        return None
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def tell(lines: TextIO, record: Record, first: int, earlier: Path | None) -> str:
    """Write a line about a step, and give it; what is there of earlier runs goes with the first step taken, not
    before, into the new file ``earlier``."""
    if record.step == first:
        if earlier is not None:
            # Read from `lines`: to open the file once more and close it would give up the lock.
            lines.seek(0)
            with earlier.open("x", encoding="utf-8") as copy:
                shutil.copyfileobj(lines, copy)
        keep_steps(lines, first)
    told = json.dumps(record.to_json())
    lines.write(told + "\n")
    lines.flush()
    return told


def keep_steps(lines: TextIO, first: int) -> None:
    """Remove what a file of metrics says of step ``first`` and later ones: a run that was killed had taken them after
    its last save, and they are taken again. A new run begins with an empty file."""
    lines.seek(0)
    end = 0
    while line := lines.readline():
        try:
            if json.loads(line)["step"] >= first:
                break
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed, say
            break
        end = lines.tell()
    lines.truncate(end)


def remark(record: Record, allowed: int | None) -> str:
    """What a progress bar says after a step."""
    peak = record.measured_peak_nbytes or record.planned_peak_nbytes
    how = "measured" if record.measured_peak_nbytes else "planned"
    limit = "" if allowed is None else f" of {format_nbytes(allowed)}"
    images = record.tokens_per_second is None
    pace = f"{record.samples_per_second:.3g} images/s" if images else f"{record.tokens_per_second:.0f} tokens/s"
    return (
        f"loss {record.loss:.3f}  {pace}  {format_nbytes(peak)}{limit} ({how})  "
        f"moved {format_nbytes(sum(record.moved_nbytes.values()))}  waited {format_seconds(record.waiting_seconds)}"
    )
