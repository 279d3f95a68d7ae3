"""Runs that are killed at any moment, or have less memory than what they save."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest

MOST = 3  # steps that a child takes before it waits to be killed, so that every kill hits one
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


class Nursery:
    """Forks children that say when they are ready, and after each save."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("running.py")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, str(script)], **pipes, env={**os.environ, **ENVIRONMENT})
        self._child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def start(self, job: dict[str, Any]) -> None:
        """Returns when it has its imports."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        self._child = int(self.line().removeprefix("ready "))

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip()

    def lines(self) -> list[str]:
        """All to the end of the child, and how it ended."""
        found: list[str] = []
        while not found or not found[-1].startswith("ended "):
            found.append(self.line())
            assert found[-1], "the nursery has ended"
        return found

    def kill(self) -> None:
        os.kill(self._child, signal.SIGKILL)


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.full)])
def test_killed_at_any_moment_the_last_save_is_whole(kills: int, tmp_path: Path) -> None:
    """Resumed each time, the end is that of the run that was let alone. Every other one is killed from outside at some
    moment of its start or its first steps, the others just before some file operation of their saves: each at another
    part of one, since a few moments drawn from all might miss what is half written."""
    steps, moments, halves = MOST * (kills + 1), random.Random(0), 0
    job = {"home": str(tmp_path / "home"), "saves": str(tmp_path / "alone"), "steps": steps}
    with Nursery() as nursery:
        nursery.start(job)
        begin = time.monotonic()
        assert [nursery.line() for _ in range(MOST)] == ["saved"] * MOST
        seconds = time.monotonic() - begin
        expected = nursery.lines()[-2]
        job["saves"] = str(tmp_path / "saves")
        for number in range(kills):
            if number % 2:
                part = (number // 2 + moments.random()) / (kills // 2)
                nursery.start({**job, "most": MOST, "killed_in": (moments.randrange(1, MOST), part)})
            else:
                nursery.start({**job, "most": MOST})
                time.sleep(moments.uniform(0, seconds))
                nursery.kill()
            assert nursery.lines()[-1] == f"ended {-signal.SIGKILL}"
            halves += len(list((tmp_path / "saves").glob(".saving-*")))
        nursery.start(job)
        assert nursery.lines()[-2:] == [expected, "ended 0"]
    assert halves >= kills // 4, "too few were killed within a save"
    left = [p.name for p in (tmp_path / "saves").iterdir()]
    assert sorted(left) == [f"{steps - 1:06d}", f"{steps:06d}"]


@pytest.mark.full
def test_saving_and_loading_take_no_memory_of_the_size_of_the_model(tmp_path: Path) -> None:
    """450 MB of parameters and state within 144 MB beyond a small run; the first child saves, the second one loads."""
    options = {"layers": 12, "width": 512, "budget": 64 << 20, "made_on": "meta"}
    job = {"home": str(tmp_path / "home"), "saves": str(tmp_path / "saves"), "options": options}
    unlimited = finished({**job, "steps": 2, "saves": str(tmp_path / "other")})
    finished({**job, "steps": 1, "allowed": 144 << 20})
    assert finished({**job, "steps": 2, "allowed": 144 << 20}) == unlimited
