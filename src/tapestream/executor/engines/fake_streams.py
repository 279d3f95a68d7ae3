"""`FakeStreams`: streams on the CPU that find every missing edge, so that the `cuda` engine is tested without a GPU.

There is a vector clock per stream and per thread (Mattern, "Virtual time and global states of distributed systems",
1989): an operation is ordered after another exactly when its clock has reached the other's tick. Every use of a region
is checked against the earlier ones, so a missing edge is an error at each run, not a race now and then.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from tapestream.errors import GradientError
from tapestream.executor.engines.adversarial import checksum, poison
from tapestream.ir import Tier
from tapestream.storage import Region

_Actor: TypeAlias = tuple[str, int]  # ("stream", number) or ("thread", identity)
_Clock: TypeAlias = dict[_Actor, int]
_COMPUTE: _Actor = ("stream", 0)


@dataclass(slots=True, eq=False)
class FakeStream:
    """``done`` copies issued to it have happened, ``waiting`` are to come; ``clock`` is that of the last issued."""

    actor: _Actor
    clock: _Clock = field(default_factory=dict)
    waiting: "deque[_Copy]" = field(default_factory=deque)
    done: int = 0

    def tick(self) -> None:
        """One more operation was issued."""
        self.clock[self.actor] = self.clock.get(self.actor, 0) + 1


@dataclass(frozen=True, slots=True, eq=False)
class FakeEvent:
    """When ``copies`` copies of ``stream`` are done; ``clock`` is the stream's when it was recorded."""

    stream: FakeStream
    copies: int
    clock: _Clock


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    source: Region
    target: Region
    nbytes: int
    generations: tuple[int, int]


@dataclass(slots=True, eq=False)
class _Uses:
    """Who wrote a region last and who read it since, with their ticks; and its checksum while compute uses it."""

    writer: tuple[_Actor, int] | None
    readers: _Clock = field(default_factory=dict)
    before_compute: int | None = None


class FakeStreams:
    """Streams on the CPU that check every edge, and copy as late as the edges allow; targets hold NaN until then.

    A use that is not ordered after the uses that it depends on raises GradientError. Memory new to it is taken to have
    been compute's until now, as the caching allocator's may have been.
    """

    def __init__(self) -> None:
        self._compute = FakeStream(_COMPUTE)
        self._streams = 1
        self._threads: dict[int, _Clock] = {}
        self._uses: WeakKeyDictionary[Region, _Uses] = WeakKeyDictionary()
        self._lock = threading.RLock()

    def new_stream(self) -> FakeStream:
        """See `StreamApi`."""
        self._streams += 1
        return FakeStream(("stream", self._streams - 1))

    def current_stream(self) -> FakeStream:
        """See `StreamApi`: always the same one, on which compute runs as it is issued."""
        return self._compute

    def record(self, stream: FakeStream) -> FakeEvent:
        """See `StreamApi`."""
        with self._lock:
            return FakeEvent(stream, stream.done + len(stream.waiting), dict(stream.clock))

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """See `StreamApi`; the copies that ``event`` stands for happen here."""
        with self._lock:
            _run(event)
            _join(stream.clock, event.clock)

    def happened(self, event: FakeEvent) -> bool:
        """See `StreamApi`: never before somebody waits for it."""
        return event.stream.done >= event.copies

    def synchronize(self, event: FakeEvent) -> None:
        """See `StreamApi`; the copies that ``event`` stands for happen here."""
        with self._lock:
            _run(event)
            _join(self._thread_clock(), event.clock)

    def copy(self, stream: FakeStream, source: Region, target: Region, nbytes: int) -> None:
        """See `StreamApi`. Raises GradientError where an edge is missing."""
        with self._lock:
            self._issue(stream)
            self._read(source, stream.clock, stream.actor, "a copy")
            self._write(target, stream.clock, stream.actor, "a copy")
            stream.waiting.append(_Copy(source, target, nbytes, (source.generation, target.generation)))
            poison(target, nbytes)

    def compute_begins(self, region: Region) -> None:
        """See `StreamApi`. Raises GradientError where an edge is missing."""
        if region.tier is Tier.DISK:
            return
        with self._lock:
            clock, actor = self._computing(region)
            self._read(region, clock, actor, "compute")
            self._uses_of(region).before_compute = checksum(region, region.nbytes)

    def compute_ended(self, region: Region) -> None:
        """See `StreamApi`. If the bytes changed, it was a write, and is checked as one."""
        if region.tier is Tier.DISK:
            return
        with self._lock:
            if self._uses_of(region).before_compute != checksum(region, region.nbytes):
                self._write(region, *self._computing(region), "compute")

    def host_uses(self, region: Region, *, writes: bool) -> None:
        """See `StreamApi`. Raises GradientError where an edge is missing."""
        with self._lock:
            check = self._write if writes else self._read
            check(region, self._thread_clock(), None, "a disk transfer")

    def released(self, region: Region) -> None:
        """See `StreamApi`. Raises GradientError where an edge is missing. HOST memory stays the pool's."""
        if region.tier is Tier.DEVICE:
            with self._lock:
                self._write(region, *self._computing(region), "whoever gets the memory")

    def _computing(self, region: Region) -> tuple[_Clock, _Actor | None]:
        if region.tier is Tier.HOST:
            return self._thread_clock(), None
        self._issue(self._compute)
        return self._compute.clock, _COMPUTE

    def _issue(self, stream: FakeStream) -> None:
        _join(stream.clock, self._thread_clock())  # a thread issues nothing before what it blocked for has happened
        stream.tick()

    def _thread_clock(self) -> _Clock:
        return self._threads.setdefault(threading.get_ident(), {})

    def _uses_of(self, region: Region) -> _Uses:
        uses = self._uses.get(region)
        if uses is None:
            ticks = self._compute.clock.get(_COMPUTE, 0)
            uses = self._uses[region] = _Uses((_COMPUTE, ticks) if region.tier is Tier.DEVICE else None)
        return uses

    def _read(self, region: Region, clock: _Clock, actor: _Actor | None, who: str) -> None:
        uses = self._uses_of(region)
        if uses.writer is not None and not _ordered(uses.writer, clock):
            raise GradientError(f"{who} reads {region} without being ordered after the write of {uses.writer}")
        if actor is not None:
            uses.readers[actor] = clock[actor]

    def _write(self, region: Region, clock: _Clock, actor: _Actor | None, who: str) -> None:
        uses = self._uses_of(region)
        earlier = [*uses.readers.items(), *([uses.writer] if uses.writer is not None else [])]
        for use in earlier:
            if not _ordered(use, clock):
                raise GradientError(f"{who} overwrites {region} without being ordered after the use of {use}")
        # A thread's own use is over when its call returns, and whatever is issued later comes later: none to remember.
        uses.writer = (actor, clock[actor]) if actor is not None else None
        uses.readers.clear()


def _ordered(use: tuple[_Actor, int], clock: _Clock) -> bool:
    actor, tick = use
    return clock.get(actor, 0) >= tick


def _join(clock: _Clock, other: _Clock) -> None:
    for actor, tick in other.items():
        clock[actor] = max(clock.get(actor, 0), tick)


def _run(event: FakeEvent) -> None:
    stream = event.stream
    while stream.done < event.copies:
        copy = stream.waiting.popleft()
        stream.done += 1
        if copy.generations != (copy.source.generation, copy.target.generation):
            raise GradientError(f"{copy.source} or {copy.target} was released before the copy between them ran")
        copy.target.memory[: copy.nbytes].copy_(copy.source.memory[: copy.nbytes])
