"""The picture of a plan: stages over time, memory over time in each tier against its budget, and who was busy."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tapestream.costs import Budget
from tapestream.errors import InputError
from tapestream.ir import MEMORIES, Action, Tier
from tapestream.ir.timeline import Span, Timeline
from tapestream.planning.steps import draw_stages
from tapestream.simulate.clock import HOST_LANE

_SORTS = {
    "Forward": ("forward", "#4c78a8"), "Record": ("forward, recorded", "#1b9e9e"), "Backward": ("backward", "#f58518"),
    "Turn": ("head and loss", "#b279a2"), "Update": ("update", "#54a24b"), "waiting": ("waiting for copies", "#d62728"),
    "starting": ("starting copies", "#ff9896"),
    "copy in": ("copy towards the device", "#9d755d"), "copy out": ("copy away from it", "#bab0ac"),
}  # fmt: skip
_COMPUTING = {"compute", "start", "stall"}  # lanes of the computing thread
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_SECONDS = ((1.0, "seconds"), (1e3, "milliseconds"), (1e6, "microseconds"))
_MANY = 400  # bars of a lane, or samples of memory, that can be told apart
_BINS = 1000


def figure_of(width: float, height: float) -> Any:
    """An empty figure of that many inches. Raises InputError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('drawing needs matplotlib; install it with: pip install "tapestream[plots]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def saved(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure. Raises InputError for an ending that matplotlib does not know, or a folder that is not there."""
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise InputError(f"cannot draw into {os.fspath(path)!r}: {error}") from error


def unit_of(nbytes: float) -> tuple[int, str]:
    """The largest unit of bytes of which there is at least one."""
    return next((pair for pair in _UNITS if nbytes >= pair[0]), _UNITS[-1])


def draw(
    path: str | os.PathLike[str],
    actions: Iterable[Action],
    stages: int,
    timeline: Timeline,
    budget: Budget,
    lying_nbytes: Mapping[Tier, int],
    outside_nbytes: int,
    names: Mapping[Tier, str],
    title: str,
) -> None:
    """Draw into ``path``. ``lying_nbytes``: bytes of blocks that lie in each tier for the whole step."""
    tiers = [tier for tier in MEMORIES if tier is Tier.DEVICE or any(nbytes for _, nbytes in timeline.memory[tier])]
    lanes = ["compute", *sorted({span.lane for span in timeline.spans} - _COMPUTING, reverse=True)]
    heights = [3.4, *(2.2 for _ in tiers), 0.9 + 0.45 * len(lanes)]
    figure = figure_of(12, sum(heights))
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max((span.start_seconds + span.duration_seconds for span in timeline.spans), default=0.0)
    scale, unit = next((pair for pair in _SECONDS if end * pair[0] >= 1), _SECONDS[-1])
    draw_stages(axes[0], actions, timeline.spans, stages, scale, names)
    for axis, tier in zip(axes[1:], tiers, strict=False):
        samples = [(at * scale, nbytes) for at, nbytes in timeline.memory[tier]]
        outside = outside_nbytes if tier is Tier.DEVICE else 0
        _memory(axis, _thinned(samples, end * scale), budget.nbytes(tier), outside, lying_nbytes[tier], names[tier])
    _lanes(axes[-1], timeline.spans, lanes, end, scale, names)
    axes[-1].set_xlabel(unit)
    axes[0].set_title(title)
    saved(figure, path)


def _thinned(samples: list[tuple[float, int]], end: float) -> list[tuple[float, int]]:
    """Steps of memory up to ``end``; of more than can be told apart, the highest in each part of the time."""
    if samples:
        samples = [*samples, (end, samples[-1][1])]
    if len(samples) <= _BINS:
        return samples
    highest: dict[int, int] = {}
    before = 0
    for at, nbytes in samples:
        column = int(at / end * _BINS) if end else 0
        highest[column] = max(highest.get(column, before), nbytes)
        before = nbytes
    return [(column / _BINS * end, nbytes) for column, nbytes in highest.items()]


def _memory(
    axis: Any, samples: Sequence[tuple[float, int]], allowed: int | None, outside: int, lying: int, name: str
) -> None:
    """Three layers: what is outside the chain, blocks that lie there, and what comes and goes."""
    top = max(allowed or 0, max((nbytes for _, nbytes in samples), default=0))
    factor, unit = unit_of(top)
    seconds = [at for at, _ in samples]
    total = [nbytes / factor for _, nbytes in samples]
    floor = [min(outside / factor, nbytes) for nbytes in total]
    blocks = [min((outside + lying) / factor, nbytes) for nbytes in total]
    layers = (
        ([0.0] * len(total), floor, "outside the chain", "#c7c7c7"),
        (floor, blocks, "blocks lying here", "#98c379"),
        (blocks, total, "tape and blocks passing" if lying else "tape", "#4c78a8"),
    )
    for low, high, label, colour in layers:
        if any(b > a for a, b in zip(low, high, strict=True)):
            axis.fill_between(seconds, low, high, step="post", label=label, color=colour, alpha=0.8, linewidth=0)
    if allowed is not None:
        axis.axhline(allowed / factor, color="black", linestyle="--", linewidth=1, label="budget")
    axis.set_ylabel(f"{name}, {unit}")
    axis.set_ylim(0, top / factor * 1.08 or 1.0)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _lanes(
    axis: Any, spans: Iterable[Span], lanes: list[str], end: float, scale: float, names: Mapping[Tier, str]
) -> None:
    """One row for compute with its waits, one for each direction of copies.

    A row of more bars than can be told apart shows what share of each moment goes to what.
    """
    rows: dict[int, dict[str, list[tuple[float, float]]]] = {row: {} for row in range(len(lanes))}
    for span in spans:
        if span.duration_seconds == 0:
            continue
        row = lanes.index("compute" if span.lane in _COMPUTING else span.lane)
        rows[row].setdefault(_sort(span), []).append((span.start_seconds, span.duration_seconds))
    labelled: set[str] = set()
    for row, sorts in rows.items():
        many = sum(map(len, sorts.values())) > _MANY
        base = np.full(_BINS, row + 0.4)
        for sort in (sort for sort in _SORTS if sort in sorts):
            words, colour = _SORTS[sort]
            label = None if sort in labelled else words
            labelled.add(sort)
            if many:
                height = base - 0.8 * _shares(sorts[sort], end)
                at = np.linspace(0, end * scale, _BINS)
                axis.fill_between(at, base, height, step="mid", color=colour, label=label, linewidth=0)
                base = height
            else:
                bars = [(start * scale, seconds * scale) for start, seconds in sorts[sort]]
                axis.broken_barh(
                    bars, (row - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3, label=label
                )
    called = {tier.name: names[tier] for tier in Tier}
    ticks = [" to ".join(called.get(word, word) for word in lane.split(" to ")) for lane in lanes]
    axis.set_yticks(range(len(lanes)), ticks)
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    if labelled:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _shares(bars: Iterable[tuple[float, float]], end: float) -> Any:
    """The share of each of `_BINS` equal parts of the time up to ``end`` that ``bars`` (start, seconds) cover."""
    edges = np.array([(start, start + seconds) for start, seconds in bars]) / (end or 1.0) * _BINS
    covered = np.zeros(_BINS + 1)
    for sign, ends in ((1, edges[:, 0]), (-1, edges[:, 1])):
        # Covered up to x: the sum over bars of how far x lies beyond the start, less the same for the end.
        whole = np.minimum(ends.astype(int), _BINS)
        np.add.at(covered, whole, sign * (whole + 1 - ends))
        np.add.at(covered, np.minimum(whole + 1, _BINS), sign * (ends - whole))
    return np.clip(np.cumsum(covered)[:_BINS], 0, 1)


def _sort(span: Span) -> str:
    """Which colour a span has."""
    if span.lane == "stall":
        return "waiting"
    if span.lane == "start":
        return "starting"
    if span.lane == "compute":
        return span.name.split()[0]
    if span.lane == HOST_LANE:
        return "Update"
    source, target = (Tier[word] for word in span.lane.split(" to "))
    return "copy in" if target < source else "copy out"
