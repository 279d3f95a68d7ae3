"""The picture of a plan: memory over time in each tier against its budget, and the lanes below."""

import os
from collections.abc import Mapping
from typing import Any

from tapestream.costs import Budget, Profile
from tapestream.errors import InputError
from tapestream.ir import Kind, Tier, Value
from tapestream.ir.timeline import Span, Timeline

_COLOURS = {
    "Forward": "#4c78a8", "Record": "#72b7b2", "Backward": "#f58518", "Update": "#54a24b", "Turn": "#b279a2",
    "waiting": "#d62728", "copy in": "#9d755d", "copy out": "#bab0ac",
}  # fmt: skip
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def nbytes_of(value: Value, profile: Profile) -> int:
    """Bytes of a parameter-block value."""
    block = profile.blocks[value.index]
    match value.kind:
        case Kind.PARAMETERS:
            return block.parameters_nbytes
        case Kind.GRADIENT:
            return block.gradient_nbytes
        case Kind.BUFFERS:
            return block.buffers_nbytes
        case _:
            return block.optimizer_state_nbytes


def draw(
    path: str | os.PathLike[str],
    timeline: Timeline,
    budget: Budget,
    lying_nbytes: Mapping[Tier, int],
    outside_nbytes: int,
    names: Mapping[Tier, str],
    title: str,
) -> None:
    """Draw into ``path``. ``lying_nbytes``: bytes of blocks that lie in each tier for the whole step."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError('drawing needs matplotlib; install it with: pip install "tapestream[plots]"') from error
    tiers = [tier for tier in Tier if tier is Tier.DEVICE or any(nbytes for _, nbytes in timeline.memory[tier])]
    figure = Figure(figsize=(11, 2.4 * len(tiers) + 2.8), layout="constrained")
    axes = figure.subplots(len(tiers) + 1, 1, sharex=True, squeeze=False)[:, 0]
    end = max((span.start_seconds + span.duration_seconds for span in timeline.spans), default=0.0)
    for axis, tier in zip(axes, tiers, strict=False):
        samples = timeline.memory[tier]
        outside = outside_nbytes if tier is Tier.DEVICE else 0
        _memory(
            axis,
            (*samples, (end, samples[-1][1])) if samples else (),
            budget.nbytes(tier),
            outside,
            lying_nbytes[tier],
            names[tier],
        )
    _lanes(axes[-1], timeline.spans, names)
    axes[0].set_title(title)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise InputError(f"cannot draw into {os.fspath(path)!r}: {error}") from error


def _memory(
    axis: Any, samples: tuple[tuple[float, int], ...], allowed: int | None, outside: int, lying: int, name: str
) -> None:
    """Three layers: what is outside the chain, blocks that lie there, and what comes and goes."""
    top = max(allowed or 0, max((nbytes for _, nbytes in samples), default=0))
    factor, unit = next((pair for pair in _UNITS if top >= pair[0]), _UNITS[-1])
    seconds = [at for at, _ in samples]
    total = [nbytes / factor for _, nbytes in samples]
    floor = [min(outside / factor, nbytes) for nbytes in total]
    blocks = [min((outside + lying) / factor, nbytes) for nbytes in total]
    layers = (
        ([0.0] * len(total), floor, "outside the chain", "#c7c7c7"),
        (floor, blocks, "blocks lying here", "#98c379"),
        (blocks, total, "tape and blocks passing", "#4c78a8"),
    )
    for low, high, label, colour in layers:
        if any(b > a for a, b in zip(low, high, strict=True)):
            axis.fill_between(seconds, low, high, step="post", label=label, color=colour, alpha=0.8, linewidth=0)
    if allowed is not None:
        axis.axhline(allowed / factor, color="black", linestyle="--", linewidth=1, label="budget")
    axis.set_ylabel(f"{name}, {unit}")
    axis.set_ylim(bottom=0)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _lanes(axis: Any, spans: tuple[Span, ...], names: Mapping[Tier, str]) -> None:
    """One row for compute with its waits, one for each direction of copies."""
    called = {tier.name: names[tier] for tier in Tier}
    lanes = list(dict.fromkeys(["compute", *(span.lane for span in spans if span.lane not in ("compute", "stall"))]))
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in spans:
        row = lanes.index("compute" if span.lane == "stall" else span.lane)
        bars.setdefault((row, _sort(span)), []).append((span.start_seconds, span.duration_seconds))
    labelled: set[str] = set()
    for (row, sort), found in sorted(bars.items(), key=lambda item: list(_COLOURS).index(item[0][1])):
        label = None if sort in labelled else sort
        labelled.add(sort)
        axis.broken_barh(
            found, (row - 0.4, 0.8), facecolors=_COLOURS[sort], edgecolor="white", linewidth=0.3, label=label
        )
    ticks = [" to ".join(called.get(word, word) for word in lane.split(" to ")) for lane in lanes]
    axis.set_yticks(range(len(lanes)), ticks)
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    if labelled:
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _sort(span: Span) -> str:
    """Which colour a span has."""
    if span.lane == "stall":
        return "waiting"
    if span.lane == "compute":
        return span.name.split()[0]
    source, target = (Tier[word] for word in span.lane.split(" to "))
    return "copy in" if target < source else "copy out"
