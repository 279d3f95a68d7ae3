"""How the commands speak: tables, one red line for errors, a progress bar."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

from tapestream.units import format_nbytes

_PAGE = 120
"""Characters a line, in a file or a pipe."""

Advance = Callable[[str, int, int, str], None]
"""What a progress bar is told: what is done, how much of it, of how much, and a remark."""


def failure(message: str) -> None:
    """One red line on standard error."""
    _to_people(message, "red")


def warning(message: str) -> None:
    """One yellow line on standard error."""
    _to_people(message, "yellow")


def _to_people(message: str, style: str) -> None:
    told = escape(" ".join(message.split()))
    Console(stderr=True, emoji=False).print(told, style=style, soft_wrap=True, highlight=False)


def line(text: str, style: str | None = None) -> None:
    """A line on standard output."""
    Console(emoji=False).print(escape(text), style=style, soft_wrap=True, highlight=False)


def as_json(document: Mapping[str, Any]) -> None:
    """A JSON document on standard output, and nothing else."""
    print(json.dumps(document, indent=2))


def table(title: str, rows: Iterable[Iterable[str]], columns: Iterable[str] = ("", "")) -> None:
    """A table; the first column is left-aligned and not broken. Where nothing says how wide the page is, it is wide."""
    from rich.table import Table  # a line that says what went wrong does not wait for it

    made = Table(title=title, title_justify="left", show_header=any(columns := list(columns)))
    for number, name in enumerate(columns):
        made.add_column(name, no_wrap=number == 0, overflow="fold")
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    console = Console(emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PAGE
    console.print(made)


@contextmanager
def progress(total: str = "") -> Iterator[Advance]:
    """A bar on standard error; where that is no terminal, one line whenever something is complete."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, emoji=False)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[remark]}"), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def advance(what: str, done: int, of: int, remark: str = "") -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=of, remark=remark)
        bar.update(tasks[what], completed=done, total=of, remark=remark)
        if bar.disable and (done == of or remark):
            console.print(escape(f"{what} {done}/{of}  {remark}".rstrip()), soft_wrap=True, highlight=False)

    with bar:
        yield advance


def rate(bytes_per_second: float) -> str:
    """``"1.5 GB/s"``: decimal units, as links are sold."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"


def flops(per_second: float | None) -> str:
    """``"1.2 TFLOP/s"``."""
    if per_second is None:
        return "unknown"
    return f"{per_second / 1e12:.3g} TFLOP/s" if per_second >= 1e12 else f"{per_second / 1e9:.3g} GFLOP/s"


def share(nbytes: float, allowed: int | None) -> str:
    """``"3.0 GiB of 8.0 GiB (38%)"``."""
    if allowed is None:
        return f"{format_nbytes(nbytes)}, no limit given"
    return f"{format_nbytes(nbytes)} of {format_nbytes(allowed)} ({nbytes / max(1, allowed):.0%})"


def number(value: float) -> str:
    """Three significant digits, written out: ``"2,910"``, ``"0.322"``."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"
