"""Runs that are killed at any moment, or have less memory than what they save."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

STEPS = 12
# Freed memory goes back to the system, so that the limit is one of what is used.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def child(job: dict[str, Any]) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("running.py")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, str(script), json.dumps(job)], **pipes, env={**os.environ, **ENVIRONMENT})


def finished(job: dict[str, Any]) -> str:
    out, err = child(job).communicate(timeout=240)
    assert "digest" in out, err
    return str(json.loads(out.splitlines()[-1])["digest"])


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.full)])
def test_killed_at_any_moment_the_last_save_is_whole(kills: int, tmp_path: Path) -> None:
    """Resumed each time, the end is that of the run that was let alone."""
    expected = finished({"home": str(tmp_path / "home"), "saves": str(tmp_path / "alone"), "steps": STEPS})
    job = {"home": str(tmp_path / "home"), "saves": str(tmp_path / "saves"), "steps": STEPS}
    moments = random.Random(0)
    for _ in range(kills):
        with child(job) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
    assert finished(job) == expected
    left = [p.name for p in (tmp_path / "saves").iterdir()]
    assert sorted(left) == [f"{STEPS - 1:06d}", f"{STEPS:06d}"]


@pytest.mark.full
def test_saving_and_loading_take_no_memory_of_the_size_of_the_model(tmp_path: Path) -> None:
    """450 MB of parameters and state within 144 MB beyond a small run; the first child saves, the second one loads."""
    options = {"layers": 12, "width": 512, "budget": 64 << 20, "made_on": "meta"}
    job = {"home": str(tmp_path / "home"), "saves": str(tmp_path / "saves"), "options": options}
    unlimited = finished({**job, "steps": 2, "saves": str(tmp_path / "other")})
    finished({**job, "steps": 1, "allowed": 144 << 20})
    assert finished({**job, "steps": 2, "allowed": 144 << 20}) == unlimited
