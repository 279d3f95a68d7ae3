"""The picture of a trade-off: seconds of a step against the peak on the device, one curve per planner."""

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tapestream.planning.picture import figure_of, saved, unit_of
from tapestream.units import format_seconds

Points: TypeAlias = Sequence[tuple[int, float]]
"""(peak bytes on the device, seconds of a step)."""

_MARKERS = "osD^v<>Pp*Xhd8"


def draw(
    path: str | os.PathLike[str],
    curves: Mapping[str, Points],
    *,
    allowed_nbytes: int | None,
    stored_seconds: float,
    device: str,
    title: str,
) -> None:
    """Draw ``curves`` into ``path``, in their order, without the points that another of the same curve beats in both;
    planners of one and the same curve share it.

    ``allowed_nbytes``: the budget that was asked for; ``stored_seconds``: with everything stored on the device;
    ``device``: what people call it. Raises InputError where matplotlib is missing or does not know the ending.
    """
    figure = figure_of(12, 7)
    from matplotlib.ticker import LogLocator, NullLocator

    axis = figure.subplots()
    factor, unit = unit_of(max((nbytes for points in curves.values() for nbytes, _ in points), default=0))
    for number, (points, names) in enumerate(_shared(curves)):
        axis.plot(
            [nbytes / factor for nbytes, _ in points], [seconds for _, seconds in points],
            color=f"C{number % 10}", marker=_MARKERS[number % len(_MARKERS)], markersize=5, linewidth=1.4,
            linestyle=("-", "--", ":")[number // 10 % 3], label=",\n".join(names), alpha=0.85,
        )  # fmt: skip
    axis.axhline(stored_seconds, color="black", linewidth=1, linestyle="--", label="everything stored and resident")
    if allowed_nbytes is not None:
        axis.axvline(allowed_nbytes / factor, color="#d62728", linewidth=1, linestyle="--", label="budget asked for")
    axis.set_xlabel(f"peak on the device ({device}), {unit}")
    axis.set_ylabel("a step, simulated")
    for ticks, written in ((axis.xaxis, "{x:g}"), (axis.yaxis, lambda seconds, _: format_seconds(seconds))):
        ticks.axes.set(**{f"{ticks.axis_name}scale": "log"})
        ticks.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ticks.set_major_formatter(written)
        ticks.set_minor_locator(NullLocator())
    axis.grid(alpha=0.25)
    axis.set_title(title)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    saved(figure, path)


def _shared(curves: Mapping[str, Points]) -> list[tuple[Points, list[str]]]:
    """Curves with the names of those who made them."""
    found: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in curves.items():
        found.setdefault(tuple(unbeaten(points)), []).append(name)
    return list(found.items())


def unbeaten(points: Points) -> list[tuple[int, float]]:
    """Points by bytes, without those for which another takes neither more bytes nor more seconds."""
    kept: list[tuple[int, float]] = []
    for nbytes, seconds in sorted(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((nbytes, seconds))
    return kept
