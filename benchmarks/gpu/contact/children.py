"""Commands in child processes that end in time, and with everything that they started."""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]
_TAIL = 12  # lines


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: ``status`` None where its time ran out. ``tail``: the last lines that it printed."""

    status: int | None
    tail: tuple[str, ...]

    @property
    def error(self) -> str:
        """Why it failed, in words; empty where it did not."""
        if self.status is None:
            return "its time ran out"
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return f"exit status {self.status}" if self.status else ""


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run ``command`` from the root of the project for at most ``seconds``, and print what it prints as it comes.

    The child leads a group of its own, which is killed as a whole when the time is up, when the child has ended (it may
    have left others behind), and when this process is interrupted.
    """
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment_of(environment), text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
    assert child.stdout is not None
    reader = threading.Thread(target=_echo, args=(child.stdout, tail), daemon=True)
    reader.start()
    try:
        status: int | None = child.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        kill_group(child)
    reader.join(5)
    return Ended(status, tuple(tail))


def kill_group(child: subprocess.Popen[str]) -> None:
    """End a child that leads a group, with all in the group."""
    with contextlib.suppress(ProcessLookupError):  # all of them may have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def environment_of(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of a child: the tree's own sources, output at once, kernels of cuBLAS that give the same bits each time."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {**os.environ, **found, **(more or {})}


def _echo(output: IO[str], tail: "collections.deque[str]") -> None:
    with output:
        for line in output:
            sys.stdout.write(f"    {line}")
            sys.stdout.flush()
            if line.strip():
                tail.append(line.rstrip()[:300])
