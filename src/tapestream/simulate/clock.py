"""Time: one compute lane and one lane per direction between two tiers, which slow each other down."""

import math
from collections import deque
from dataclasses import dataclass

from tapestream.costs import Link, Machine
from tapestream.ir import Tier


@dataclass(slots=True, eq=False)
class Job:
    """One copy in a lane. ``start`` is NaN until its lane reaches it, ``end`` until it is complete (seconds)."""

    link: Link
    latency_left: float
    nbytes_left: float
    start: float = math.nan
    end: float = math.nan

    def next_event(self, mixed: bool) -> float:
        """Seconds until the latency, or the transfer after it, is over if nothing changes meanwhile."""
        if self.latency_left > 0:
            return self.latency_left
        return self.nbytes_left / (self.link.mixed if mixed else self.link.bytes_per_second)

    def progress(self, seconds: float, mixed: bool) -> None:
        """Let ``seconds``, at most `next_event`, pass."""
        if self.latency_left > 0:
            self.latency_left = max(0.0, self.latency_left - seconds)
        else:
            rate = self.link.mixed if mixed else self.link.bytes_per_second
            self.nbytes_left = max(0.0, self.nbytes_left - seconds * rate)

    def finish_event(self) -> None:
        """Set exactly to zero what `next_event` was about, so that rounding leaves no crumbs behind."""
        if self.latency_left > 0:
            self.latency_left = 0.0
        else:
            self.nbytes_left = 0.0

    @property
    def done(self) -> bool:
        """True when nothing is left to do."""
        return self.latency_left == 0 and self.nbytes_left == 0


class LanePair:
    """The two directions between two tiers, each in order of issue, simulated together from event to event."""

    __slots__ = ("lanes", "time")

    def __init__(self) -> None:
        self.lanes: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self.time = 0.0

    def advance(self, until: float, job: Job | None = None) -> None:
        """Let time pass up to ``until``, or, if given, exactly until ``job`` has ended."""
        while job is None or math.isnan(job.end):
            heads = [lane[0] for lane in self.lanes if lane]
            if not heads:
                self.time = max(self.time, until)
                return
            mixed = len(heads) == 2
            for head in heads:
                if math.isnan(head.start):
                    head.start = self.time
            events = [head.next_event(mixed) for head in heads]
            step = min(events)
            if self.time + step > until:
                for head in heads:
                    head.progress(until - self.time, mixed)
                self.time = until
                return
            for head, event in zip(heads, events, strict=True):
                if event == step:
                    head.finish_event()
                else:
                    head.progress(step, mixed)
            self.time += step
            for lane in self.lanes:
                if lane and lane[0].done:
                    lane.popleft().end = self.time


class Clock:
    """Seconds since the step began. ``machine`` None means that copies take no time."""

    __slots__ = ("compute_seconds", "copies", "machine", "now", "pairs", "spans", "stall_seconds")

    def __init__(self, machine: Machine | None, tracing: bool) -> None:
        self.machine = machine
        self.now = 0.0
        self.compute_seconds = 0.0
        self.stall_seconds = 0.0
        self.pairs: dict[tuple[Tier, Tier], LanePair] = {}
        self.spans: list[tuple[str, str, float, float]] | None = [] if tracing else None
        self.copies: list[tuple[str, str, Job]] = []

    def compute(self, seconds: float, name: str, index: int) -> None:
        """The compute lane is busy for ``seconds``."""
        if self.spans is not None:
            self.spans.append(("compute", f"{name} {index}", self.now, seconds))
        self.now += seconds
        self.compute_seconds += seconds

    def issue(self, name: str, source: Tier, target: Tier, nbytes: int, copies: int = 1) -> Job | None:
        """Start to move ``nbytes``, as so many copies, now or as soon as the lane is free. InputError: the machine has
        no such link."""
        if self.machine is None:
            return None
        link = self.machine.link(source, target)
        busy = copies * link.busy_seconds
        if busy:
            if self.spans is not None:
                self.spans.append(("start", f"start {name}", self.now, busy))
            self.now += busy
            self.compute_seconds += busy
        pair = self.pairs.setdefault((min(source, target), max(source, target)), LanePair())
        pair.advance(self.now)
        job = Job(link, link.latency_seconds, float(nbytes))
        pair.lanes[source > target].append(job)
        if self.spans is not None:
            self.copies.append((f"{source.name} to {target.name}", name, job))
        return job

    def wait(self, name: str, source: Tier, target: Tier, job: Job | None) -> None:
        """Compute stands still until ``job`` has ended."""
        if job is None:
            return
        self.pairs[min(source, target), max(source, target)].advance(math.inf, job)
        stall = job.end - self.now
        if stall > 0:
            if self.spans is not None:
                self.spans.append(("stall", f"wait for {name}", self.now, stall))
            self.now = job.end
            self.stall_seconds += stall
