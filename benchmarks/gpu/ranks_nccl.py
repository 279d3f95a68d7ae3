"""Several GPUs of one machine that train one GPT: ours beside FSDP2 and DistributedDataParallel, at equal memory.

    PYTHONPATH=src:. python -m benchmarks.gpu.ranks_nccl --out DIR            # on every GPU, 1.3 billion parameters
    PYTHONPATH=src:. python -m benchmarks.gpu.ranks_nccl --out DIR --quick    # in small: does it run?
    PYTHONPATH=src:. python -m benchmarks.gpu.ranks_nccl --out DIR --dry      # in small, on the CPU with gloo

Each side has processes of its own, one for each GPU, and a time limit. Each result is a line of DIR/results.jsonl as
soon as it is known. The exit status is the number of verdicts that are false (at most 100); with fewer than two GPUs it
is 2. README.md in this folder says what each side expects.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.contact import children
from benchmarks.gpu.contact.rank import SIDES, Job
from benchmarks.gpu.contact.results import Result, Results

SIZES = {
    "layers": 24, "width": 2048, "heads": 16, "vocabulary": 50_304, "tokens": 2048, "batch": 4, "rounds": 10,
}  # fmt: skip
SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1024, "tokens": 128, "batch": 2, "rounds": 3}
TINY = SMALL | {"width": 64, "vocabulary": 256, "tokens": 32, "rounds": 2}
_SECONDS = 180.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sides asked for; the exit status."""
    given = _parser().parse_args(arguments)
    try:
        ranks, card = _machine(given)
    except RuntimeError as error:
        print(f"ranks_nccl: {error}")
        return 2
    sizes = {**(TINY if given.dry else SMALL if given.quick else SIZES)}
    sizes |= {name: asked for name in sizes if (asked := getattr(given, name)) is not None}
    results = Results(given.out.resolve(), card)
    since = len(results.read())
    for side in given.only or SIDES:
        job = Job(side, ranks, given.dry, str(results.folder), card, since, **sizes)
        print(f"{side}: {SIDES[side].title} (at most {given.seconds:.0f} s)", flush=True)
        ended = children.run([sys.executable, "-m", "benchmarks.gpu.contact.rank", job.to_json()], given.seconds)
        if ended.error:
            numbers = {"error": ended.error, "output": ended.tail}
            results.write(side, Result(SIDES[side].title, "runs to its end", False, numbers))
    return results.status(since)


def _machine(given: argparse.Namespace) -> tuple[int, str]:
    """How many ranks, and the name of the GPU. Raises RuntimeError where there are too few."""
    if given.dry:
        return given.ranks or 2, f"{os.cpu_count()} cores, gloo"
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = given.ranks or there
    if there < max(2, ranks):
        raise RuntimeError(f"PyTorch finds {there} CUDA devices here, of {max(2, ranks)} needed; --dry runs on the CPU")
    return ranks, torch.cuda.get_device_name()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ranks_nccl", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl, to which lines are added")
    parser.add_argument("--only", type=_names, default=(), help="sides, separated by commas: " + ", ".join(SIDES))
    parser.add_argument("--ranks", type=_several, help="processes, each with a GPU (all of them)")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for each side (%(default).0f)")
    parser.add_argument("--quick", action="store_true", help="in small: whether everything runs")
    parser.add_argument("--dry", action="store_true", help="in small, on the CPU with gloo: numbers mean nothing")
    for name, number in SIZES.items():
        parser.add_argument(f"--{name}", type=int, help=f"({number})")
    return parser


def _names(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if unknown := [name for name in found if name not in SIDES]:
        raise argparse.ArgumentTypeError(f"no side is named {', '.join(unknown)}; there are {', '.join(SIDES)}")
    return found


def _several(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError("several processes are at least two")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
