"""Claims of long programs: a record takes at most 400 bytes of host memory an operation; backward runs as many
stretches as the plan counts; binomial checkpointing beats bisection, in 1% or one state more memory, by the factor that
the formulas say of as many restart checkpoints; and with bisection a ten times longer program keeps, in the same
memory, at most one restart checkpoint more for each doubling.

The program is a loop of products with a matrix and tanh. For the record the matrix is 4 x 4, so that operations are as
small as they can be: its bytes are those that a process grows by beside the same program in plain PyTorch with
everything saved thrown away, whose graph is the same; each grows in a process of its own. What runs again is counted
in a quarter of the states' memory, where few stretches do, and in a 2,500th of it, which takes as many as there may be.
"""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import ceil, log2
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks

import tapestream as ts
from benchmarks.common import Row, Settings, process_nbytes, save, settings, yes
from tapestream.ir import Free, Keep, Kind, Value
from tapestream.planners._recurrences import least_forwards

TITLE = "Programs of up to a million operations: bytes of the record, what runs again, restart checkpoints"
MOST_NBYTES = 400
_ROOM = 1.01  # a stretch may be an operation longer than another's
_QUARTER, _TIGHT, _LEAST = 4, 2500, 40  # parts of the states' memory, and states at least
W, WIDE = (
    (torch.randn(side, side, generator=torch.Generator().manual_seed(0)) / (2 * side)).requires_grad_()
    for side in (4, 32)
)
_STATE_NBYTES = WIDE.nbytes


def program(x: torch.Tensor, operations: int, w: torch.Tensor = W) -> torch.Tensor:
    """Two operations at a time."""
    for _ in range(operations // 2):
        x = torch.tanh(x @ w)
    return x


def main() -> None:
    """Measure all, or be a child."""
    if sys.argv[1:2] == ["--child"]:
        print(_grown(sys.argv[2], int(sys.argv[3])))
        return
    chosen = settings("cpu", rounds=1)
    save("program_long", TITLE, chosen, rows(chosen))


def rows(chosen: Settings) -> Iterator[Row]:
    """The record, what runs again, and what is kept."""
    yield record(1000 if chosen.quick else 1_000_000)
    operations = 1000 if chosen.quick else 100_000
    for part in (_QUARTER, _TIGHT):
        yield from reversals(operations, part)
    yield growth(operations // 10, operations)


def record(operations: int) -> Row:
    """Bytes an operation."""
    plain, grown = (_in_child(kind, operations) for kind in ("plain", "program"))
    nbytes = (grown - plain) / operations
    return {
        "what": "record", "operations": operations, "bytes an operation": round(nbytes, 1),
        "plain graph, bytes an operation": round(plain / operations, 1), "claim": f"at most {MOST_NBYTES} bytes",
        "met": yes(nbytes <= MOST_NBYTES),
    }  # fmt: skip


def _in_child(kind: str, operations: int) -> int:
    command = [sys.executable, "-m", "benchmarks.program_long", "--child", kind, str(operations)]
    root = Path(__file__).parents[1]
    return int(subprocess.run(command, check=True, cwd=root, capture_output=True, text=True).stdout)


def _grown(kind: str, operations: int) -> int:
    """Bytes that this process grows by in one forward."""
    if kind == "program":
        return _growth(ts.Program(program, budget=400_000, planner="revolve"), operations)
    with saved_tensors_hooks(lambda tensor: None, lambda handle: torch.empty(0)):
        return _growth(program, operations)


def _growth(run: Callable[..., torch.Tensor], operations: int) -> int:
    run(torch.ones(4, 4), 100)
    gc.collect()
    before = process_nbytes()["RssAnon"]
    y = run(torch.ones(4, 4), operations)
    after = process_nbytes()["RssAnon"]
    assert y.requires_grad
    return after - before


def reversals(operations: int, part: int) -> Iterator[Row]:
    """Forwards by planner in a ``part`` of the states' memory, and of binomial in what bisection takes."""
    budget = _budget(operations, part)
    for planner in ("revolve", "binomial"):
        yield _reversed(planner, operations, budget)[1]
    bisected, first = _reversed("bisection", operations, budget)
    yield first
    assert bisected.plan is not None
    peak = bisected.plan.peak_nbytes
    _, second = _reversed("binomial", operations, max(int(_ROOM * peak), peak + _STATE_NBYTES))
    n, ratio = len(bisected.plan.profile), first["forwards"] / second["forwards"]
    tabled = halved(n) / (n + least_forwards(n, most_kept(bisected)))
    yield {
        **second, "what": "bisection over binomial, in 1% or one state more memory", "ratio": round(ratio, 3),
        "by the formulas": round(tabled, 3), "claim": "at least what the formulas say", "met": yes(ratio >= tabled),
    }  # fmt: skip


def _budget(operations: int, part: int) -> int:
    return max(_LEAST, operations // part) * _STATE_NBYTES


def _reversed(planner: str, operations: int, budget: int) -> tuple[ts.Program, Row]:
    """A program's second call, forward and backward."""
    run = ts.Program(program, budget=budget, planner=planner)
    for _ in range(2):
        with ts.track_memory("cpu") as meter:
            y = run(torch.ones_like(WIDE), operations, WIDE).sum()
            assert run._replays is not None
            replays = run._replays()
            assert replays is not None
            y.backward()  # type: ignore[no-untyped-call]
        WIDE.grad = None
    plan, steps = run.plan, replays.steps
    assert plan is not None
    forwards = len(plan.profile) + steps.stages
    return run, {
        "what": planner, "operations": operations, "states allowed": budget // _STATE_NBYTES,
        "states at the peak": round(meter.peak_nbytes / _STATE_NBYTES), "stretches": len(plan.profile),
        "forwards": forwards, "planned": plan.simulation.forwards, "restart checkpoints": most_kept(run),
        "operations run": operations + steps.operations, "claim": "forwards as planned",
        "met": yes(forwards == plan.simulation.forwards),
    }  # fmt: skip


def most_kept(run: ts.Program) -> int:
    """The most restart checkpoints that a plan holds at once."""
    assert run.plan is not None
    held, most = set[int](), 0
    for action in run.plan.schedule:
        if isinstance(action, Keep):
            held.add(action.stage)
        elif isinstance(action, Free) and isinstance(action.value, Value) and action.value.kind is Kind.STATE:
            held.discard(action.value.index)
        most = max(most, len(held))
    return most


def growth(shorter: int, longer: int) -> Row:
    """Restart checkpoints of two lengths in the same memory, by bisection."""
    budget = _budget(longer, _TIGHT)
    short, long = (_reversed("bisection", operations, budget)[1] for operations in (shorter, longer))
    allowed = ceil(log2(longer / shorter))
    more = long["restart checkpoints"] - short["restart checkpoints"]
    return {
        **long, "what": f"bisection, from {shorter} to {longer} operations", "more than in the shorter": more,
        "claim": f"at most {allowed} more", "met": yes(more <= allowed),
    }  # fmt: skip


def halved(n: int) -> int:
    """Forwards of bisection, the recorded ones included (Griewank 1992)."""
    return n if n == 1 else n // 2 + halved(n - n // 2) + halved(n // 2)


if __name__ == "__main__":
    main()
