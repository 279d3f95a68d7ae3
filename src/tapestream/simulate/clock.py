"""Time: one compute lane and one lane per direction between two tiers, which slow each other down."""

import math
from collections import deque
from dataclasses import dataclass

from tapestream.costs import Link, Machine
from tapestream.ir import Tier

HOST_LANE = "updates on HOST"
_NO_LINK = Link(1.0)  # nothing passes it


@dataclass(slots=True, eq=False)
class Job:
    """One copy in a lane, or one update on the host (seconds).

    ``start`` is NaN until its lane reaches it, ``end`` until it is complete.
    """

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

    __slots__ = ("lanes", "looked", "time")

    def __init__(self) -> None:
        self.lanes: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self.time = 0.0
        self.looked = True  # at all jobs, up to ``time``

    def add(self, job: Job, *, back: bool) -> None:
        """One more copy, in one of the directions."""
        self.lanes[back].append(job)
        self.looked = False

    def advance(self, until: float, job: Job | None = None) -> None:
        """Let time pass up to ``until``, or, if given, exactly until ``job`` has ended."""
        if job is None and self.looked and until <= self.time:
            return
        ahead, back = self.lanes
        while job is None or math.isnan(job.end):
            if ahead and back:
                going_on = self._both(ahead, back, until)
            elif ahead or back:
                going_on = self._one(ahead or back, until)
            else:
                self.time, going_on = max(self.time, until), False
            if not going_on:
                self.looked = True
                return

    def _one(self, lane: deque[Job], until: float) -> bool:
        """Up to the next event of the only lane with copies; False where that is later than ``until``."""
        head = lane[0]
        if math.isnan(head.start):
            head.start = self.time
        step = head.next_event(False)
        if self.time + step > until:
            head.progress(until - self.time, False)
            self.time = until
            return False
        head.finish_event()
        self.time += step
        if head.done:
            lane.popleft().end = self.time
        return True

    def _both(self, ahead: deque[Job], back: deque[Job], until: float) -> bool:
        """The same, where both lanes have copies."""
        heads = ahead[0], back[0]
        for head in heads:
            if math.isnan(head.start):
                head.start = self.time
        events = [head.next_event(True) for head in heads]
        step = min(events)
        if self.time + step > until:
            for head in heads:
                head.progress(until - self.time, True)
            self.time = until
            return False
        for head, event in zip(heads, events, strict=True):
            if event == step:
                head.finish_event()
            else:
                head.progress(step, True)
        self.time += step
        for lane in self.lanes:
            if lane[0].done:
                lane.popleft().end = self.time
        return True


def lane_of(source: Tier, target: Tier) -> tuple[Tier, Tier]:
    """The lane of a copy: shards go to other memories as all bytes of the device do."""
    return _LANES[source][target]


_LANES = [[(s, t) if s.memory is t.memory else (s.memory, t.memory) for t in Tier] for s in Tier]


class Clock:
    """Seconds since the step began. ``machine`` None means that copies take no time."""

    __slots__ = ("compute_seconds", "copies", "host_free", "machine", "now", "pairs", "spans", "stall_seconds", "ways")

    def __init__(self, machine: Machine | None, tracing: bool) -> None:
        self.machine = machine
        self.now = 0.0
        self.compute_seconds = 0.0
        self.stall_seconds = 0.0
        self.pairs: dict[tuple[Tier, Tier], LanePair] = {}
        self.ways: dict[tuple[Tier, Tier], tuple[Link, LanePair, bool]] = {}  # those that were asked for
        self.spans: list[tuple[str, str, float, float]] | None = [] if tracing else None
        self.copies: list[tuple[str, str, Job]] = []
        self.host_free = 0.0  # when the host has ended the updates that were begun

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
        link, pair, back = self._way(source, target)
        busy = copies * link.busy_seconds
        if busy:
            if self.spans is not None:
                self.spans.append(("start", f"start {name}", self.now, busy))
            self.now += busy
            self.compute_seconds += busy
        pair.advance(self.now)
        job = Job(link, link.latency_seconds, float(nbytes))
        pair.add(job, back=back)
        if self.spans is not None:
            source, target = lane_of(source, target)
            self.copies.append((f"{source.name} to {target.name}", name, job))
        return job

    def update_on_host(self, name: str, seconds: float) -> Job:
        """Begin an update there, now or as soon as those before it have ended."""
        start = max(self.now, self.host_free)
        self.host_free = start + seconds
        job = Job(_NO_LINK, 0.0, 0.0, start, self.host_free)
        if self.spans is not None:
            self.copies.append((HOST_LANE, f"Update {name}", job))
        return job

    def is_idle(self, source: Tier, target: Tier) -> bool:
        """Whether the lane of such copies has none to make now."""
        if self.machine is None:
            return True
        _, pair, back = self._way(source, target)
        pair.advance(self.now)
        return not pair.lanes[back]

    def _way(self, source: Tier, target: Tier) -> tuple[Link, LanePair, bool]:
        """The link of a copy, the lanes that it takes one of, and whether it is that back."""
        found = self.ways.get((source, target))
        if found is None:
            assert self.machine is not None
            one, other = lane_of(source, target)
            pair = self.pairs.setdefault((min(one, other), max(one, other)), LanePair())
            back = one > other and one is not Tier.SHARD  # other ranks have one lane for both
            found = self.ways[source, target] = self.machine.link(source, target), pair, back
        return found

    def wait(self, name: str, source: Tier, target: Tier, job: Job | None) -> None:
        """Compute stands still until ``job`` has ended."""
        if job is None:
            return
        if source is not target:  # else an update, whose end is known
            self._way(source, target)[1].advance(math.inf, job)
        stall = job.end - self.now
        if stall > 0:
            if self.spans is not None:
                self.spans.append(("stall", f"wait for {name}", self.now, stall))
            self.now = job.end
            self.stall_seconds += stall
