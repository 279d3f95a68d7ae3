"""The demo's picture: memory over one step, measured and simulated, against the budget."""

from pathlib import Path
from typing import Any

from tapestream.errors import InputError
from tapestream.units import format_nbytes, format_seconds

_PHASES = (("forward", "#4c78a8"), ("backward, with updates", "#f58518"), ("step", "#54a24b"))


def draw_memory(path: Path, end: dict[str, Any], budget: int) -> None:
    """Draw what a child said at its end (see `demo_child`). Raises InputError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('the picture needs matplotlib; install it with: pip install "tapestream[plots]"') from error
    measured = end["measured"]
    unit, name = (2**30, "GiB") if budget >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(11, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharey=True)
    above = [(at, (nbytes + measured["held"]) / unit) for at, nbytes in measured["samples"]]
    simulated = [(at, nbytes / unit) for at, nbytes in end["simulated"]]
    bounds = list(measured["phases"])
    _panel(upper, above, bounds, budget / unit, f"measured: peak {format_nbytes(measured['peak'])}")
    phases = end["simulated_phases"]
    edges = [0.0]
    for key in ("forward", "backward", "step"):
        edges.append(edges[-1] + phases.get(key, 0.0))
    _panel(
        lower, simulated, edges, budget / unit, f"simulated before the run: peak {format_nbytes(end['simulated_peak'])}"
    )
    for axis in (upper, lower):
        axis.set_ylabel(f"memory, {name}")
    lower.set_xlabel("seconds since the step began")
    figure.suptitle(f"One training step within {format_nbytes(budget)} ({format_seconds(bounds[-1])} measured)")
    figure.savefig(path, dpi=120)


def _panel(axis: Any, samples: list[tuple[float, float]], edges: list[float], budget: float, title: str) -> None:
    end = max(edges[-1], samples[-1][0])
    for (label, colour), start, stop in zip(_PHASES, edges, [*edges[1:-1], end], strict=False):
        if stop - start > end * 1e-3:
            axis.axvspan(start, stop, color=colour, alpha=0.12, label=label, linewidth=0)
    seconds, nbytes = [at for at, _ in samples], [value for _, value in samples]
    axis.step([*seconds, end], [*nbytes, nbytes[-1]], where="post", color="black", linewidth=0.8)
    axis.fill_between([*seconds, end], [*nbytes, nbytes[-1]], step="post", color="#4c78a8", alpha=0.35, linewidth=0)
    axis.axhline(budget, color="#d62728", linestyle="--", linewidth=1.2, label="budget")
    axis.set_title(title, loc="left", fontsize="medium")
    axis.set_xlim(0, end)
    axis.set_ylim(0, max(budget, *nbytes) * 1.15)
    axis.legend(loc="upper right", ncols=4, fontsize="small")
