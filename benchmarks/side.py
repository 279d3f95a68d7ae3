"""One of the two sides that `benchmarks.against` compares: a process that runs the steps of a benchmark on demand.

Both processes live at once, and one works while the other waits: what else the machine does meets both alike. They
talk in lines: a command goes in (``next``, or a number of calls), one line of JSON comes out.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
_SERVE = "import sys; from benchmarks.side import serve; serve(*sys.argv[1:])"
_WARM = 3  # calls: the first ones profile and plan
_GOODBYE = 5.0  # seconds


class Refused(Exception):
    """What cannot be compared, in one line."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A row whose plan is made; ``seconds``: of processor time, of the last call so far."""

    row: str
    seconds: float
    plan: str


class Side:
    """The steps of one benchmark, run by one source tree in a process of its own."""

    def __init__(self, name: str, source: Path, benchmark: str, quick: bool) -> None:
        self.name, self._benchmark = name, benchmark
        paths = [str(source), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, benchmark, str(source), "quick" if quick else "full"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,  # Ctrl-C is for the one that compares
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=_GOODBYE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def next(self) -> Ready | None:
        """The next row, warmed up; None after the last. Raises `Refused` where it does not run."""
        answer = self._ask("next")
        return Ready(**answer) if answer else None

    def seconds(self, calls: int) -> float:
        """Processor time of so many calls."""
        return float(self._ask(str(calls))["seconds"])

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(command, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Refused(f"{self._benchmark} with {self.name}: ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Refused(f"{self._benchmark} with {self.name}: {answer['error']}")
        return answer


def serve(benchmark: str, source: str, size: str) -> None:
    """Answer every command until there are no more of them: what the process of a `Side` does."""
    with suppress(BrokenPipeError), os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a library prints is no answer
        try:
            for answer in _answers(benchmark, source, size == "quick"):
                print(json.dumps(answer), file=answers, flush=True)
        except BrokenPipeError:
            raise  # nobody listens any more
        except Exception as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps({"error": line}), file=answers, flush=True)


def _answers(benchmark: str, source: str, quick: bool) -> Iterator[dict[str, Any]]:
    import torch

    import tapestream as ts
    from benchmarks.common import Settings

    if not Path(ts.__file__).is_relative_to(source):
        raise ImportError(f"tapestream comes from {ts.__file__}")
    torch.set_num_threads(1)
    chosen = Settings("cpu", quick, 1, 1, False, tempfile.gettempdir())
    sys.stdin.readline()
    for work in importlib.import_module(f"benchmarks.{benchmark}").workloads(chosen):
        for _ in range(_WARM):
            seconds = _seconds(work.step, 1)
        yield {"row": work.name, "seconds": seconds, "plan": work.plan()}
        while (command := sys.stdin.readline().strip()).isdigit():
            yield {"seconds": _seconds(work.step, int(command))}
        if not command:
            return
        del work  # before there is another
    yield {}


def _seconds(step: Callable[[], object], calls: int) -> float:
    gc.collect()  # what came before is not paid for here
    begin = time.process_time()
    for _ in range(calls):
        step()
    return time.process_time() - begin
