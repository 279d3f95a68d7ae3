"""`Timeline`: who was busy when, and how many bytes each tier held; simulated or measured."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tapestream.errors import StorageError
from tapestream.ir.actions import Tier


@dataclass(frozen=True, slots=True)
class Span:
    """``lane`` was busy with ``name`` for ``duration_seconds``."""

    lane: str
    name: str
    start_seconds: float
    duration_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans, and for each tier the samples (seconds, nbytes) of what it held, in order of time."""

    spans: tuple[Span, ...]
    memory: Mapping[Tier, tuple[tuple[float, int], ...]]

    def chrome_trace(self) -> dict[str, object]:
        """The timeline in the trace event format, which Perfetto and chrome://tracing open (times in microseconds)."""
        lanes = {lane: thread for thread, lane in enumerate(dict.fromkeys(span.lane for span in self.spans), 1)}
        events: list[dict[str, object]] = [_name("process_name", 0, "tapestream")]
        events += [_name("thread_name", thread, lane) for lane, thread in lanes.items()]
        events += [
            {
                "ph": "X", "pid": 1, "tid": lanes[span.lane], "cat": span.lane, "name": span.name,
                "ts": span.start_seconds * 1e6, "dur": span.duration_seconds * 1e6,
            }
            for span in self.spans
        ]  # fmt: skip
        events += [
            {"ph": "C", "pid": 1, "tid": 0, "name": f"{tier.name} bytes", "ts": at * 1e6, "args": {"bytes": nbytes}}
            for tier, samples in self.memory.items()
            for at, nbytes in samples
        ]
        return {"displayTimeUnit": "ms", "traceEvents": events}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `chrome_trace` as JSON to ``path``, readable by its owner only; an existing file is replaced at once.

        Raises StorageError when the folder cannot be written; an existing file is then left as it was.
        """
        target = Path(path)
        try:
            # A temporary file of this kind has mode 0600, and renaming keeps it.
            handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(self.chrome_trace(), file)
                os.replace(beside, target)
            except BaseException:
                os.unlink(beside)
                raise
        except OSError as error:
            raise StorageError(
                f"cannot write the timeline to {target}: {error}; choose a folder that exists"
            ) from error


def _name(kind: str, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}
