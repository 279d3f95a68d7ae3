"""Claim: ten million steps forward and backward run within a hard limit of 256 MiB above the interpreter, at a time per
step within 10% of that of a hundred thousand steps at the same repetition number.

A recurrence h <- sin(h * w) on 64 numbers, in stages of 500 steps. Revolve evaluates a step at most r times again where
n <= C(s + r, r) for n stages and s restart checkpoints (Griewank & Walther 2000); 19 of them for 100,000 steps and 200
for 10,000,000 both give r = 2. Each run is a child of its own that may take what Python and PyTorch take after a small
run of the same kind, plus the limit. "memory flat": the same number of restart checkpoints at n and 10 n.

    python -m benchmarks.loop_long                  # a million steps
    python -m benchmarks.loop_long --full           # ten million: about 15 minutes
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, forget_resident_peak, mebibytes, process_nbytes, save, yes

TITLE = "Ten million steps within 256 MiB, and their time beside a hundred thousand"
CHUNK = 500
LIMIT = 256 * 2**20
SLOTS = {1_000: 2, 10_000: 5, 100_000: 19, 1_000_000: 62, 10_000_000: 200}
"""Restart checkpoints of so many steps: the fewest that repeat no step more than twice."""


def main() -> None:
    """All runs, each in a child."""
    given = parser().parse_args()
    if given.child:
        child(*given.child)
        return
    chosen = Settings("cpu", given.quick, 1, given.threads, not given.quick, ".", given.results)
    save("loop_long", TITLE, chosen, rows(chosen, given.full), limit_MiB=LIMIT / 2**20, chunk=CHUNK)


def rows(chosen: Settings, full: bool) -> Iterator[Row]:
    """The short run before and after the long one, so that a change of the machine's speed is seen."""
    short, long = (1_000, 10_000) if chosen.quick else (100_000, 10_000_000 if full else 1_000_000)
    before, row, after = (run(n, SLOTS[n], chosen) for n in (short, long, short))
    yield before
    mean = (before["us/step"] + after["us/step"]) / 2
    ratio = row["us/step"] / mean
    yield row | {"ratio to the shorter": round(ratio, 3), "claim": "at most 1.10", "met": yes(ratio <= 1.10)}
    yield after
    flat = run(10 * short, SLOTS[short], chosen)
    yield flat | {"peak of the shorter": round(flat["peak MiB"] / before["peak MiB"], 3)}
    yield {"steps": long, "what": "plain PyTorch", **run(long, 0, chosen)}


def run(steps: int, slots: int, chosen: Settings) -> Row:
    """What the child says, or ``failed`` and why."""
    command = [sys.executable, "-m", "benchmarks.loop_long", "--child", str(steps), str(slots)]
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(chosen.threads),
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    }  # fmt: skip
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return {"failed": last[-1][:120]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def child(steps: int, slots: int) -> None:
    """One run under the limit; prints its row. Without ``slots`` the loop is plain Python."""
    work(1_500, slots)
    resource.setrlimit(resource.RLIMIT_DATA, (process_nbytes()["VmData"] + LIMIT,) * 2)
    forget_resident_peak()
    before = process_nbytes()["VmRSS"]
    began, cpu = time.perf_counter(), time.process_time()
    row = work(steps, slots)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(json.dumps({
        "steps": steps, **row, "s": round(seconds, 1), "us/step": round(cpu / steps * 1e6, 2),
        "peak MiB": mebibytes(process_nbytes()["VmHWM"] - before),
    }))  # fmt: skip


def work(steps: int, slots: int) -> Row:
    """A gradient through so many steps."""
    weight = torch.linspace(0.5, 1.5, 64).requires_grad_()
    state = torch.ones(64)
    row: Row = {}
    if slots:
        run = ts.Loop(lambda h: torch.sin(h * weight), planner="revolve", slots=slots, chunk=CHUNK)
        state = run(state, steps=steps)
        assert run.plan is not None
        forwards = run.plan.simulation.forwards / len(run.plan.profile)
        row = {"restart checkpoints": slots, "forwards a step": round(forwards, 3)}
    else:
        for _ in range(steps):
            state = torch.sin(state * weight)
    state.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    return row


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser()
    made.add_argument("--quick", action="store_true", help="ten thousand steps, nothing is written")
    made.add_argument("--full", action="store_true", help="ten million steps")
    made.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file (%(default)s)")
    made.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    return made


if __name__ == "__main__":
    main()
