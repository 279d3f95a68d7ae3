"""What a GPU has to say about tapestream, in one command and 560 seconds.

    PYTHONPATH=src python -m benchmarks.gpu.first_contact --out DIR

Each step runs in a process of its own with a time limit of its own; each result is a line of DIR/results.jsonl as soon
as it is known, so that a run cut off at any moment keeps what it had. A step that fails or takes too long is a line
with its error, and the next runs. ``--only a,b,c`` chooses steps, ``--dry`` runs them in small on the simulated GPU.
The exit status is the number of verdicts that are false (at most 100); without a GPU it is 2. README.md in this folder
says what each step expects.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.contact import children, simulated
from benchmarks.gpu.contact.results import Result, Results
from benchmarks.gpu.contact.step import command_of

TOTAL_SECONDS = 560.0
_DRY_FACTOR = 6  # the simulated GPU computes on the CPU


@dataclass(frozen=True, slots=True)
class Step:
    """``command``: arguments for Python, given the seconds that the step has. ``least_seconds``: with fewer left it is
    not begun. ``extra``: nothing is missing then."""

    name: str
    title: str
    seconds: float
    command: Callable[[float], Sequence[str]]
    least_seconds: float = 15.0
    extra: bool = False


TABLE = (
    ("a", "the card, its links and its speed", 15, "card:measure", 12),
    ("b", "tests/gpu", 80, "truth:tests", 20),
    ("c", "everyday scenarios behind long kernels", 30, "truth:scenarios", 15),
    ("d", "a GPT at a third of its memory", 45, "memory:third", 20),
    ("e", "a streamed 3B model under the profiler", 45, "overlap:streamed", 25),
    ("f", "everything_fits and kept_attention", 60, "speed:rows", 20),
    ("g", "8B, full fine-tuning within 12 GB", 200, "large:eight_billion", 60),
    ("h", "175B with one stored layer", 80, "large:gpt_175b", 40),
    ("updates", "updates in RAM", 60, "updates:in_ram", 25),
    ("13b", "13B in bfloat16 with SGD", 90, "large:gpt_13b", 45),
    ("fsdp2", "beside FSDP2 with CPU offload", 150, "peers:fsdp2", 60),
    ("deepspeed", "beside DeepSpeed's ZeRO-3 with CPU offload", 150, "peers:deepspeed", 60),
)
"""Name, title, seconds on an H100, function in `benchmarks.gpu.contact`, seconds without which it is not begun."""
EXTRAS = ("updates", "13b", "fsdp2", "deepspeed")
"""These run with time left only: where there is none, nothing is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps asked for; the exit status."""
    began, given = time.monotonic(), _parser().parse_args(arguments)
    try:
        card = _simulated() if given.dry else _card()
    except RuntimeError as error:
        print(f"first_contact: {error}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("first_contact: terminated"))  # so that children are killed too
    results = Results(given.out.resolve(), card)
    steps = [step for step in _steps(results, given.dry) if not given.only or step.name in given.only]
    total = (given.seconds or TOTAL_SECONDS) * (_DRY_FACTOR if given.dry and not given.seconds else 1)
    spent = 0.0 if given.dry else time.monotonic() - began  # importing PyTorch counts, compiling the simulator does not
    return run(steps, results, total - spent)


def run(steps: Sequence[Step], results: Results, total: float) -> int:
    """The steps in turn, within ``total`` seconds; the number of verdicts that are false."""
    ends, before = time.monotonic() + total, len(results.read())
    for step in steps:
        seconds = min(step.seconds, ends - time.monotonic())
        if seconds < min(step.seconds, step.least_seconds):
            print(f"{step.name}: no time left for {step.title}", flush=True)
            if not step.extra:
                results.write(step.name, Result(step.title, "runs", False, {"error": "no time was left"}))
            continue
        print(f"{step.name}: {step.title} (at most {seconds:.0f} s)", flush=True)
        begin = time.monotonic()
        ended = children.run([sys.executable, *step.command(seconds)], seconds)
        took = time.monotonic() - begin
        if ended.error:
            numbers = {"error": ended.error, "output": ended.tail, "took_seconds": round(took, 1)}
            results.write(step.name, Result(step.title, "runs to its end", False, numbers))
        print(f"{step.name}: {ended.error or 'done'} after {took:.0f} s", flush=True)
    return results.status(before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.first_contact", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl, to which lines are added")
    parser.add_argument("--only", type=_names, default=(), help="steps, separated by commas: " + ", ".join(_NAMES))
    parser.add_argument("--seconds", type=float, help=f"for all steps together ({TOTAL_SECONDS:.0f})")
    parser.add_argument("--dry", action="store_true", help="in small, on the simulated GPU: numbers mean nothing")
    return parser


_NAMES = tuple(name for name, *_ in TABLE)


def _names(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := [name for name in found if name not in _NAMES]:
        raise argparse.ArgumentTypeError(f"no step is named {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    return found


def _steps(results: Results, dry: bool) -> list[Step]:
    factor = _DRY_FACTOR if dry else 1

    def command(name: str, function: str) -> Callable[[float], Sequence[str]]:
        return lambda seconds: command_of(name, function, results.folder, results.card, seconds, dry)

    return [
        Step(name, title, seconds * factor, command(name, function), least, name in EXTRAS)
        for name, title, seconds, function, least in TABLE
    ]


def _card() -> str:
    """The name of the GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no CUDA device here; --dry runs every step on a simulated one")
    return torch.cuda.get_device_name()


def _simulated() -> str:
    """The same of the simulated one, which is compiled now: no step's time is for that."""
    simulated.build()
    return "simulated"


if __name__ == "__main__":
    sys.exit(main())
