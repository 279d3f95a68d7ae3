"""What `tapestream plan` says of GPTs on GPUs of common sizes: the table of docs/my-model-does-not-fit.md.

Simulations, not measurements: kernels are taken to reach 60 TFLOP/s, links and disks what `tapestream plan` assumes
unless told. Every row is one command, which the row holds.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, save, settings

TITLE = "What to expect of a step, simulated"
RATE = "60e12"
GPUS = (8, 12, 24, 80)
_SIXTEEN = ("--dtype", "bf16", "--update", "backward")


def main() -> None:
    """Ask for every row."""
    chosen = settings("cpu", rounds=1)
    save("what_to_expect", TITLE, chosen, rows(chosen.quick), flops_per_second=float(RATE))


def rows(quick: bool) -> Iterator[Row]:
    """Models that RAM holds on every GPU, then those that need a disk."""
    for more in ((), _SIXTEEN):
        for model in ("gpt2-124m",) if quick else ("gpt2-1.5b", "gpt3-6.7b", "gpt3-13b"):
            for gpu in GPUS[:1] if quick else GPUS:
                yield _row(model, gpu, 256, more)
    if not quick:
        yield _row("gpt3-13b", 24, 64, ())
        yield _row("gpt3-175b", 12, 64, _SIXTEEN)


def _row(model: str, gpu: int, ram: int, more: tuple[str, ...]) -> Row:
    words = ["plan", model, "--gpu", f"{gpu}GiB", "--ram", f"{ram}GiB", "--disk", "4TB", "--flops", RATE, *more]
    said = said_to(words)
    row: Row = {
        "model": model, "dtype": said["model"]["dtype"], "GPU GiB": gpu, "RAM GiB": ram,
        "batch": said["batch"], "tokens": said["sequence"], "fits": "yes" if said["fits"] else "no",
        "command": shlex.join(["tapestream", *words]),
    }  # fmt: skip
    return {**row, **(_answered(said["answer"]) if said["fits"] else {"least GiB": _gib(said["least_nbytes"])})}


def said_to(words: Sequence[str], source: Path | None = None) -> dict[str, Any]:
    """The JSON document that the command prints; that of the code in ``source``, if given."""
    command = [sys.executable, "-m", "tapestream.cli.app", *words, "--json"]
    inside = None if source is None else {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inside)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _answered(answer: dict[str, Any]) -> Row:
    tiers = answer["tiers"]
    return {
        "s per step": round(answer["seconds_per_step"], 3), "of it waiting": round(answer["waiting_seconds"], 3),
        "tokens per second": round(answer["tokens_per_second"], 1), "planner": answer["planner"],
        "in RAM GiB": _gib(tiers["host"]["peak_nbytes"]), "on disk GiB": _gib(tiers["disk"]["peak_nbytes"]),
        "written to disk GiB": _gib(answer["disk_written_nbytes_per_step"]),
    }  # fmt: skip


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / 2**30, 2)


if __name__ == "__main__":
    main()
