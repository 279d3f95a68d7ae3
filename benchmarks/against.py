"""Processor time of tapestream's steps beside that of another revision of this repository.

``python -m benchmarks.against REVISION NAME...``. Of each benchmark NAME the steps of tapestream are run, as the
working tree's benchmark makes them, by the working tree's source and by that of REVISION. In a round each side is a
process of its own; both plan every step anew, then take turns: A B B A, in the next round B A A B. Imports, profiling
and planning are not counted. ``ms``: the median over rounds of the processor's milliseconds a call; ``ratio``: the
median of the rounds' ratios, below 1 where the working tree takes less. Times are comparable where both sides run the
same plan: ``plan`` says which.
"""

import argparse
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, Row, Settings, milliseconds, write_to
from benchmarks.side import ROOT, Refused, Side

NAMES = ("everything_fits", "equal_peak", "loop_overhead", "program_speed")
_TURN = 0.3  # seconds that a turn takes at least
_NEW = "working tree"
_INTERRUPTED = 130  # exit status, as of shells


@dataclass(slots=True)
class Found:
    """Seconds a call and plans of one row, of the working tree and of the other, round by round."""

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    plans: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))

    def row(self, benchmark: str, name: str) -> Row:
        """For the table and the file."""
        new, old = self.seconds
        ratios = [a / b for a, b in zip(new, old, strict=True)]
        plan, before = (" or ".join(sorted(plans)) for plans in self.plans)
        return {
            "benchmark": benchmark, "row": name,
            "ms": milliseconds(median(new)), "ms before": milliseconds(median(old)),
            "ratio": round(median(ratios), 4), "least": round(min(ratios), 4), "most": round(max(ratios), 4),
            "plan": plan, **({"plan before": before} if plan != before else {}),
        }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Compare, write, show; 1 where a ratio is above ``--most``, 2 where nothing can be compared."""
    given = _parser().parse_args(arguments)
    rounds = given.rounds if given.rounds is not None else 1 if given.quick else 5
    chosen = Settings("cpu", given.quick, rounds, 1, bool(given.out) or not given.quick, tempfile.gettempdir())
    rows: list[Row] = []
    try:
        _check(given.names, rounds, given.out)
        revision = revision_of(given.revision)
        facts = {"revision": revision, "turns": "A B B A, B A A B, ...", "seconds a turn": _TURN}
        with tempfile.TemporaryDirectory(prefix="against-") as folder:
            sources = sources_in(Path(folder), revision)
            for name in dict.fromkeys(given.names):
                rows += compared(name, (_NEW, revision), sources, chosen)
                if chosen.save:
                    title = f"Processor time of steps, against revision {revision}"
                    write_to(given.out or RESULTS / "against.json", "against", title, chosen, rows, **facts)
    except Refused as error:
        print(f"against: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"against: interrupted, with {len(rows)} rows complete", file=sys.stderr)
        return _INTERRUPTED
    show(rows, revision)
    return int(given.most is not None and any(row["ratio"] > given.most for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="against", description="Compare the working tree with another revision.")
    parser.add_argument("revision", help="what to compare with, as git names it")
    parser.add_argument("names", nargs="+", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, help="in each of which both sides begin anew (5; with --quick: 1)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written but --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result file (benchmarks/results/against.json)")
    parser.add_argument("--most", type=float, metavar="RATIO", help="exit with 1 where a row's ratio is above this")
    return parser


def _check(names: Sequence[str], rounds: int, out: Path | None) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise Refused(f"no steps of {', '.join(unknown)} can be compared; there are: {', '.join(NAMES)}")
    if rounds < 1:
        raise Refused(f"{rounds} rounds were asked for; one is the least")
    if out is not None and not out.parent.is_dir():
        raise Refused(f"there is no folder {out.parent} for the result file")


def revision_of(name: str) -> str:
    """The short hash of a revision. Raises `Refused` where there is none."""
    if not (ROOT / ".git").exists():
        raise Refused(f"{ROOT} is not a git repository, so there is nothing to compare with")
    asked = ("--short", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    try:
        return os.fsdecode(_git("rev-parse", *asked)).strip()
    except subprocess.CalledProcessError as error:
        raise Refused(f"{name!r} is no revision of this repository{_last(error)}") from error


def sources_in(folder: Path, revision: str) -> tuple[Path, Path]:
    """Copies of the working tree's source as it is now, and of that of the revision."""
    new, old = folder / "new", folder / "old"
    shutil.copytree(ROOT / "src", new / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    try:
        packed = _git("archive", "--format=tar", revision, "src")
    except subprocess.CalledProcessError as error:
        raise Refused(f"{revision} has no source that can be run{_last(error)}") from error
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(old, filter="data")
    return new / "src", old / "src"


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise Refused("there is no git on this machine") from error


def _last(error: subprocess.CalledProcessError) -> str:
    lines = os.fsdecode(error.stderr).strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def compared(benchmark: str, names: tuple[str, str], sources: tuple[Path, Path], chosen: Settings) -> list[Row]:
    """Every row of a benchmark."""
    found: dict[str, Found] = {}
    for number in range(chosen.rounds):
        print(f"{benchmark}, round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
        with ExitStack() as stack:
            sides = [
                stack.enter_context(Side(name, source, benchmark, chosen.quick))
                for name, source in zip(names, sources, strict=True)
            ]
            for row, seconds, plans in _round(sides, number % 2 == 1, 0.0 if chosen.quick else _TURN):
                into = found.setdefault(row, Found())
                for side in (0, 1):
                    into.seconds[side].append(seconds[side])
                    into.plans[side].add(plans[side])
    return [each.row(benchmark, row) for row, each in found.items()]


def _round(sides: Sequence[Side], turned: bool, turn: float) -> Iterator[tuple[str, list[float], list[str]]]:
    """Of every row its name, seconds a call, and plans, by side."""
    order = (1, 0, 0, 1) if turned else (0, 1, 1, 0)
    while True:
        ready = [side.next() for side in sides]
        here, there = ready
        if here is None or there is None or here.row != there.row:
            if here is there:
                return
            rows = " and ".join(repr(one.row) if one else "no row" for one in ready)
            raise Refused(f"the two sides have different rows: {rows}")
        calls = max(1, math.ceil(turn / max(1e-6, min(here.seconds, there.seconds))))
        taken = [0.0, 0.0]
        for side in order:
            taken[side] += sides[side].seconds(calls) / calls / 2
        yield here.row, taken, [here.plan, there.plan]


def show(rows: Sequence[Row], revision: str) -> None:
    """Print a table, and what was planned where the sides differ in it."""
    made, console = Table(title=f"Processor time of steps, working tree against {revision}"), Console()
    made.add_column("row")
    for column in ("ms", "ms before", "new/old", "least to most"):
        made.add_column(column, justify="right", no_wrap=True)
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        made.add_section()
        made.add_row(f"[bold]{benchmark}[/bold]")
        for row in (row for row in rows if row["benchmark"] == benchmark):
            made.add_row(
                row["row"], f"{row['ms']:.2f}", f"{row['ms before']:.2f}", f"{row['ratio']:.3f}",
                f"{row['least']:.3f} to {row['most']:.3f}",
            )  # fmt: skip
    console.print(made)
    for row in rows:
        if "plan before" in row:
            console.print(f"{row['row']}: other plans: {row['plan']}; before: {row['plan before']}", markup=False)


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
