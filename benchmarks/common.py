"""What all benchmarks share: running in turn, medians of ratios, peaks, and the record of machine and versions."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import tapestream as ts
from tapestream.cli.loop import held_nbytes

RESULTS = Path(__file__).parent / "results"
OF_EACH_ROW = "as in the rows, where known"
"""In the place of a file's commit, where rows are measured and replaced one by one."""
Row = dict[str, Any]
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run. ``quick``: tiny, to see that everything works; the numbers mean nothing."""

    device: str
    quick: bool
    rounds: int
    threads: int
    save: bool
    folder: str
    results: Path = RESULTS
    full: bool = False

    def facts(self, **more: object) -> dict[str, object]:
        """For the result file."""
        return {"device": self.device, "rounds": self.rounds, "threads": self.threads, **more}


@dataclass(frozen=True, slots=True)
class Workload:
    """What a benchmark times of tapestream, without what it is compared with: `benchmarks.against` times two revisions.

    ``plan`` says in words what was planned, once ``step`` has run.
    """

    name: str
    step: Run
    plan: Callable[[], str] = str


def settings(device: str = "cpu", rounds: int = 7, full: str = "") -> Settings:
    """Settings from the command line; limits PyTorch's threads. ``full``: what `--full` does, if it does anything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds A B A B ...")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the disk is that is streamed from")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file (%(default)s)")
    if full:
        parser.add_argument("--full", action="store_true", help=full)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rounds = 2 if given.quick else given.rounds
    return Settings(
        device,
        given.quick,
        rounds,
        given.threads,
        not given.quick,
        given.folder,
        given.results,
        bool(full and given.full),
    )


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds by the clock and of this process's processors, round by round, of every contender."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        """The median by the clock."""
        return median(self.wall[name])

    def ratio(self, name: str, reference: str) -> Row:
        """Median of the rounds' ratios with their quartiles, and the median ratio of processor time.

        Both of a round ran one right after the other, so that what else the machine does mostly cancels.
        """
        found = [a / b for a, b in zip(self.wall[name], self.wall[reference], strict=True)]
        low, _, high = quantiles(found, n=4) if len(found) > 2 else (min(found), 0.0, max(found))
        cpu = [a / b for a, b in zip(self.cpu[name], self.cpu[reference], strict=True) if b > 0]
        return {
            "ratio": round(median(found), 4), "quartiles": f"{low:.3f} to {high:.3f}",
            "ratio of processor time": round(median(cpu), 4),
        }  # fmt: skip


def alternate(
    runs: Mapping[str, Run], rounds: int, device: str, *, warm: int = 1, repeat: int = 1, rest: float = 0.0
) -> Timings:
    """Every contender in turn, ``rounds`` times over after ``warm`` rounds unmeasured; ``repeat`` calls each time.

    With ``rest`` each begins after as many idle seconds, and each is first as often as the others: a disk lends speed
    that what comes next has to give back.
    """
    timings, order = Timings({name: [] for name in runs}, {name: [] for name in runs}), list(runs.items())
    for number in range(-warm, rounds):
        for name, run in order:
            time.sleep(rest)
            synchronize(device)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                run()
            synchronize(device)
            if number >= 0:
                timings.wall[name].append((time.perf_counter() - wall) / repeat)
                timings.cpu[name].append((time.process_time() - cpu) / repeat)
        if rest:
            order.append(order.pop(0))
    return timings


def synchronize(device: str) -> None:
    """Wait until the GPU, if it is one, has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_nbytes(run: Run, device: str) -> int:
    """Most bytes of tensors at once beyond those before ``run``."""
    with ts.track_memory(device) as meter:
        run()
    return meter.peak_nbytes


def streamed_peak_nbytes(model: nn.Module, step: Run, device: str) -> int:
    """Bytes at the peak of one step of a streamed model: what it holds between steps, and what the step adds.

    Runs ``step`` twice: what it frees is seen only if the step that made it was measured too.
    """
    peak_nbytes(step, device)
    return held_nbytes(model) + peak_nbytes(step, device)


def process_nbytes() -> dict[str, int]:
    """Bytes of this process as the system counts them: ``VmRSS``, ``VmHWM`` (its peak), ``RssAnon``, ``VmData`` ..."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def forget_resident_peak() -> None:
    """From now on ``VmHWM`` is the peak since now."""
    Path("/proc/self/clear_refs").write_text("5")


def same_bits(left: Sequence[torch.Tensor | None], right: Sequence[torch.Tensor | None]) -> bool:
    """Whether all tensors are equal, bit for bit, wherever each of them lies."""
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b.to(a.device)))
        for a, b in zip(left, right, strict=True)
    )


def milliseconds(seconds: float) -> float:
    """Rounded, for tables."""
    return round(seconds * 1e3, 3)


def mebibytes(nbytes: int) -> float:
    """Rounded, for tables."""
    return round(nbytes / 2**20, 3)


def yes(found: bool) -> str:
    """For tables."""
    return "yes" if found else "no"


def save(name: str, title: str, settings: Settings, rows: Iterable[Row], **facts: object) -> None:
    """Print the rows as they come; write ``results/NAME.json`` with each of them, unless this is a quick run."""
    found = []
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        found.append(row)
        if settings.save:
            write(name, title, settings, found, settings.results, **facts)


def write(
    name: str, title: str, settings: Settings, rows: Sequence[Row], folder: Path = RESULTS, **facts: object
) -> None:
    """``FOLDER/NAME.json``: the rows, and when, where and with what they were measured."""
    folder.mkdir(exist_ok=True)
    write_to(folder / f"{name}.json", name, title, settings, rows, **facts)


def write_to(path: Path, name: str, title: str, settings: Settings, rows: Sequence[Row], **facts: object) -> None:
    """The same into a file of any name."""
    measured = OF_EACH_ROW if any("commit" in row for row in rows) else commit()
    document = {
        "name": name, "title": title, "date": datetime.date.today().isoformat(), "commit": measured,
        "machine": machine_name(settings.device), "versions": _versions(), "settings": settings.facts(**facts),
        "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def commit() -> str:
    """The commit at hand, for a result."""

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return found.stdout.strip()

    changed = git("status", "--porcelain", "--", "../src")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")


def machine_name(device: str) -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "").splitlines()
        if line.startswith("model name")
    ]
    found = f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
    return f"{found}, {torch.cuda.get_device_name()}" if device == "cuda" else found


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "system": platform.system()}
