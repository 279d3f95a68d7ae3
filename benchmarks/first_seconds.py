"""The first seconds: what the command and the package take before they do anything.

Each is a process of its own, by turns with the one that it is compared with, from its start to its end: that of
``python -c pass`` for the command's help, version and completion, of ``import torch`` for the package. A bad option is
timed by itself, from the shell's point of view. Nothing is claimed of the help of one command, which lists dozens of
options, and of the package with the names that most programs take of it, which are imported when they are first asked
for.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from benchmarks.common import Row, alternate, save, settings, yes

TITLE = "The first seconds of the command and the package"
COMMAND, IMPORT, BAD = 25.0, 1.10, 1.0
_PASS, _TORCH = "pass", "import torch"
_USED = "import torch, tapestream as ts; ts.stream, ts.optimizer, ts.Chain, ts.Program, ts.Loop"
_COMMAND = "import sys; sys.argv[0] = 'tapestream'; from tapestream_command import main; main()"
_COMPLETE = {"_TAPESTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "tapestream pl", "COMP_CWORD": "1"}
_WRONG = ("plan", "gpt", "--layers", "24", "--width", "1024", "--budget", "eight")


def main() -> None:
    """Measure all."""
    chosen = settings("cpu", rounds=15)
    save("first_seconds", TITLE, chosen, rows(chosen.rounds))


def rows(rounds: int) -> Iterator[Row]:
    """Row by row."""
    for what, words, environment, claim in (
        ("tapestream --help", ("--help",), {}, COMMAND),
        ("tapestream --version", ("--version",), {}, COMMAND),
        ("completion of tapestream pl", (), _COMPLETE, COMMAND),
        ("tapestream plan --help", ("plan", "--help"), {}, None),
    ):
        ours = partial(_python, _COMMAND, *words, environment=environment)
        yield _compared(what, ours, "python -c pass", partial(_python, _PASS), rounds, claim)
    torch = partial(_python, _TORCH)
    for what, code, claim in (
        ("import tapestream", "import tapestream", IMPORT),
        ("import torch, tapestream", "import torch, tapestream", IMPORT),
        ("with stream, optimizer, Chain, Program, Loop", _USED, None),
    ):
        yield _compared(what, partial(_python, code), _TORCH, torch, rounds, claim)
    timings = alternate({"bad": partial(_python, _COMMAND, *_WRONG, status=2)}, rounds, "cpu")
    seconds = timings.seconds("bad")
    yield {
        "what": "tapestream plan ... --budget eight", "seconds": round(seconds, 3), "claim": f"under {BAD:g} s",
        "met": yes(seconds < BAD),
    }  # fmt: skip


def _compared(
    what: str, ours: Callable[[], None], other: str, theirs: Callable[[], None], rounds: int, claim: float | None
) -> Row:
    timings = alternate({what: ours, other: theirs}, rounds, "cpu")
    found = {key: value for key, value in timings.ratio(what, other).items() if key != "ratio of processor time"}
    row = {"what": what, "seconds": round(timings.seconds(what), 3), "over": other, **found}
    if claim is None:
        return row
    return {**row, "claim": f"at most {claim:g}", "met": yes(found["ratio"] <= claim)}


def _python(code: str, *words: str, status: int = 0, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode != status:
        raise RuntimeError(f"{code} {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


if __name__ == "__main__":
    main()
