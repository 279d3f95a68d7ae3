"""What of one thing happened while another did: unions and intersections of intervals of time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Interval = tuple[float, float]
"""Begin and end in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, each moment once, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in which any of them lasts."""
    return sum(end - begin for begin, end in union(intervals))


def shared(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Seconds in which one of ``left`` and one of ``right`` last."""
    ours, theirs, total = union(left), union(right), 0.0
    place = 0
    for begin, end in ours:
        while place < len(theirs) and theirs[place][1] <= begin:
            place += 1
        for other in range(place, len(theirs)):
            if theirs[other][0] >= end:
                break
            total += min(end, theirs[other][1]) - max(begin, theirs[other][0])
    return total


def hidden(copies: Sequence[Interval], kernels: Sequence[Interval]) -> float | None:
    """The share of the time of copies in which a kernel ran too; None where nothing was copied."""
    whole = length(copies)
    return shared(copies, kernels) / whole if whole else None


def of_events(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Interval]]:
    """Kernels and copies between host and device, of a trace of torch.profiler: "kernel", "up", "down"."""
    found: dict[str, list[Interval]] = {"kernel": [], "up": [], "down": []}
    for event in events:
        kind = _kind(event)
        if kind:
            found[kind].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    return found


def _kind(event: Mapping[str, Any]) -> str | None:
    if event.get("ph") != "X":
        return None
    if event.get("cat") == "kernel":
        return "kernel"
    name = str(event.get("name", "")) if event.get("cat") == "gpu_memcpy" else ""
    return "up" if "HtoD" in name else "down" if "DtoH" in name else None
