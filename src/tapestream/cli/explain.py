"""``tapestream explain``: what does this function save for backward, where, and what would the plan do with it?"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tapestream.cli import show
from tapestream.cli.targets import imported
from tapestream.errors import InputError, TapestreamError
from tapestream.frontends.program.explanation import COLUMNS, Explanation, SavedTensor
from tapestream.frontends.program.program import Program


def told_of(target: str, budget: str | None, planner: str, rows: int, plot: Path | None, json_: bool) -> None:
    """Show what the program saves."""
    torch.manual_seed(0)
    found = _explained(target, budget, planner)
    if plot is not None:
        found.plot(plot)
    if json_:
        show.as_json(_document(target, found, rows))
        return
    show.table(target, [row.cells() for row in found.rows[:rows]], COLUMNS)
    if len(found.rows) > rows:
        show.line(f"and {len(found.rows) - rows} lighter ones")
    show.line(found.summary())


def _explained(target: str, budget: str | None, planner: str) -> Explanation:
    program, args, kwargs = _program(target)
    try:
        return Program(program, budget=budget, planner=planner).explain(*args, **kwargs)
    except TapestreamError:
        raise
    except Exception as error:
        raise _raised(target, error) from error


def _program(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    function = imported(target)
    try:
        with torch.no_grad():  # of a program itself, nothing is to be saved here
            found = function()
    except Exception as error:
        raise _raised(target, error) from error
    if isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and not isinstance(found[0], torch.Tensor):
        program, given = found
        if isinstance(given, dict):
            return program, (), given
        return program, given if isinstance(given, tuple) else (given,), {}
    if callable(found) and not isinstance(found, torch.Tensor):
        name = type(found).__name__
        raise InputError(f"{target} returned {name} without arguments to call it with; return ({name}, arguments)")
    return function, (), {}


def _raised(target: str, error: Exception) -> InputError:
    return InputError(f"{target} raised {type(error).__name__}: {error}")


def _document(target: str, found: Explanation, rows: int) -> dict[str, Any]:
    return {
        "program": target, "operations": found.operations, "segments": len(found.cuts) - 1,
        "restart_checkpoints": list(found.restarts), "budget_nbytes": found.budget_nbytes,
        "peak_nbytes": found.peak_nbytes, "stored_peak_nbytes": max(found.stored_nbytes),
        "sums": {fate: {"tensors": n, "nbytes": nbytes} for fate, (n, nbytes) in found.sums().items()},
        "saved": [_row(row) for row in found.rows[:rows]],
    }  # fmt: skip


def _row(row: SavedTensor) -> dict[str, Any]:
    return {
        "file": row.file, "line": row.line, "operation": row.operation, "shape": list(row.shape), "dtype": row.dtype,
        "nbytes": row.nbytes, "seconds": row.seconds, "fate": row.fate, "times": row.times,
    }  # fmt: skip
