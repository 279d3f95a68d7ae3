"""Which stage is where at which time: the classic picture of a schedule, stages over seconds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tapestream.ir import (
    Action,
    Backward,
    Forward,
    Free,
    Keep,
    Kind,
    Offload,
    Phase,
    PhaseKind,
    Prefetch,
    Record,
    Tier,
    Update,
    Value,
    Wait,
)
from tapestream.ir.timeline import Span

COLOURS = {"Forward": "#4c78a8", "Record": "#1b9e9e", "Backward": "#f58518"}
_KEPT = {Tier.DEVICE: "#333333", Tier.HOST: "#b279a2", Tier.DISK: "#9d755d"}
_COLUMNS, _ROWS = 2000, 600  # finer than the picture's points


class Held(NamedTuple):
    """A state or saved tensors in ``tier`` from ``start`` to ``stop``, seconds since the step began."""

    value: Value
    tier: Tier
    start: float
    stop: float


class Move(NamedTuple):
    """Computation that goes from the boundary ``first`` between stages to ``last``."""

    sort: str
    start: float
    stop: float
    first: int
    last: int


def held(actions: Iterable[Action], spans: Iterable[Span]) -> list[Held]:
    """Where restart checkpoints and saved tensors are, from a schedule and the spans of its timeline.

    A copy counts in its target from the moment it begins.
    """
    busy = [span for span in spans if span.lane in ("compute", "stall")]
    opened: dict[tuple[Value, Tier], float] = {}
    found: list[Held] = []
    now, done = 0.0, 0

    def close(value: Value, tier: Tier) -> None:
        if (start := opened.pop((value, tier), None)) is not None:
            found.append(Held(value, tier, start, now))

    for action in actions:
        for _ in range(_computations(action)):
            while busy[done].lane == "stall":
                done += 1
            now, done = busy[done].start_seconds + busy[done].duration_seconds, done + 1
        match action:
            case Wait() if done < len(busy) and busy[done].lane == "stall":
                now, done = busy[done].start_seconds + busy[done].duration_seconds, done + 1
            case Keep(stage):
                opened.setdefault((Value(Kind.STATE, stage), Tier.DEVICE), now)
            case Record(stage):
                opened.setdefault((Value(Kind.SAVED, stage), Tier.DEVICE), now)
            case Offload(value, _, target) | Prefetch(value, _, target) if value.kind in (Kind.STATE, Kind.SAVED):
                opened.setdefault((value, target), now)
            case Free(value, tier):
                close(value, tier)
            case Backward(stage):
                for key in [key for key in opened if key[0].kind is Kind.SAVED and key[0].index == stage]:
                    close(*key)
    return [*found, *(Held(value, tier, start, now) for (value, tier), start in opened.items())]


def _computations(action: Action) -> int:
    """Spans of computation that an action leaves."""
    match action:
        case Forward(start, stop):
            return stop - start
        case Record() | Backward() | Update(_, _, Tier.DEVICE) | Phase(PhaseKind.BACKWARD):
            return 1
        case _:
            return 0


def moves(spans: Iterable[Span]) -> Iterator[Move]:
    """Runs of stages, forwards that follow each other as one."""
    last: Move | None = None
    for span in spans:
        sort, _, index = span.name.partition(" ")
        if span.lane != "compute" or sort not in COLOURS:
            continue
        k, start, stop = int(index), span.start_seconds, span.start_seconds + span.duration_seconds
        move = Move(sort, start, stop, k + 1, k) if sort == "Backward" else Move(sort, start, stop, k, k + 1)
        if last is not None and last.sort == sort == "Forward" and last.last == k and last.stop == start:
            last = last._replace(stop=stop, last=k + 1)
            continue
        if last is not None:
            yield last
        last = move
    if last is not None:
        yield last


def draw_stages(
    axis: Any, actions: Iterable[Action], spans: Sequence[Span], stages: int, scale: float, names: Mapping[Tier, str]
) -> None:
    """Stages over time (times ``scale``) into ``axis``: computation as slopes, what is kept as level lines.

    Lines that fall onto each other at the picture's resolution are drawn once.
    """
    from matplotlib.collections import LineCollection

    end = max((span.start_seconds + span.duration_seconds for span in spans), default=0.0)
    grid = (_COLUMNS / (end or 1.0), _ROWS / stages)
    thick = min(5.0, max(0.5, 110 / stages))  # points: a stage's share of the axis, about
    lines: dict[tuple[str, str, float, float], dict[tuple[int, ...], Any]] = {}
    for value, tier, start, stop in held(actions, spans):
        state = value.kind is Kind.STATE
        y = value.index + (0.0 if state else 0.5)
        label = f"{'restart checkpoint' if state else 'saved tensors'}, {names[tier]}"
        style = (label, _KEPT[tier], 1.2, 0.9) if state else (label, _KEPT[tier], thick, 0.3)
        lines.setdefault(style, {})[_at(grid, start, y, stop, y)] = ((start * scale, y), (stop * scale, y))
    for sort, start, stop, first, last in moves(spans):
        label = {"Forward": "forward", "Record": "forward, recorded", "Backward": "backward"}[sort]
        segment = ((start * scale, first), (stop * scale, last))
        lines.setdefault((label, COLOURS[sort], 1.8, 1.0), {})[_at(grid, start, first, stop, last)] = segment
    for (label, colour, width, alpha), segments in lines.items():
        drawn = LineCollection(list(segments.values()), colors=colour, linewidths=width, alpha=alpha, label=label)
        axis.add_collection(drawn, autolim=False)
    axis.set_xlim(0, end * scale or 1.0)
    axis.set_ylim(0, stages)
    axis.set_ylabel("stage")
    axis.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _at(grid: tuple[float, float], *corner: float) -> tuple[int, ...]:
    """Both ends of a line on the grid of the picture's points."""
    return tuple(int(number * grid[k % 2]) for k, number in enumerate(corner))
