"""Timelines as files."""

import json
import stat
from pathlib import Path

import pytest

from tapestream.errors import StorageError
from tapestream.ir import Span, Tier, Timeline

TIMELINE = Timeline(
    (Span("compute", "Record 0", 0.0, 0.5), Span("DEVICE to HOST", "SAVED 0", 0.25, 1.0), Span("compute", "x", 0.5, 1)),
    {Tier.DEVICE: ((0.0, 10), (0.5, 30)), Tier.HOST: ((0.25, 20),)},
)


def test_chrome_trace() -> None:
    events = TIMELINE.chrome_trace()["traceEvents"]
    assert isinstance(events, list)
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(names) == {"tapestream", "compute", "DEVICE to HOST"}
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (names["compute"], "Record 0", 0, 5e5),
        (names["DEVICE to HOST"], "SAVED 0", 2.5e5, 1e6),
        (names["compute"], "x", 5e5, 1e6),
    ]
    counters = [(e["name"], e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counters == [("DEVICE bytes", 0, 10), ("DEVICE bytes", 5e5, 30), ("HOST bytes", 2.5e5, 20)]


def test_save_replaces_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")
    TIMELINE.save(path)
    assert json.loads(path.read_text()) == TIMELINE.chrome_trace()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_save_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write the timeline"):
        TIMELINE.save(tmp_path / "missing" / "trace.json")


def test_failed_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError):
        TIMELINE.save(tmp_path / "taken")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]
