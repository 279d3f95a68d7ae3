"""Starts the demo's children, reads what they say, and ends them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tapestream.cli.loop import Job
from tapestream.errors import TapestreamError

# Freed memory goes back to the system at once, so that a limit on the process is a limit on what is in use.
_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
_PATIENCE_SECONDS = 20


@contextmanager
def child(role: str, job: Job, *, allowance: int = 0, compared: int = 0) -> Iterator[Iterator[dict[str, Any]]]:
    """A child in ``role`` (see `demo_child`); gives what it says, message by message. It is ended with the block.

    Raises TapestreamError when it ends by itself in any other way than well.
    """
    command = [
        sys.executable, "-m", "tapestream.cli.demo_child",
        role, json.dumps(job.to_json()), str(allowance), str(compared),
    ]  # fmt: skip
    # A session of its own: Ctrl-C reaches this process alone, which then ends the child and knows when it is gone.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **_ENVIRONMENT},
    )  # fmt: skip
    try:
        yield _messages(process)
    finally:
        _end(process)


def _messages(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    complaint = process.stderr.read().strip().splitlines()
    if process.wait() != 0:
        last = complaint[-1] if complaint else "it said nothing"
        raise TapestreamError(f"a child process of the demo ended with status {process.returncode}: {last}")


def _end(process: "subprocess.Popen[str]") -> None:
    """Ask it to end, as Ctrl-C would, so that it removes its files; insist after a while."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
