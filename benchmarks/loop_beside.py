"""Claim: a Loop takes at most the time of equinox's checkpointed while loop where arithmetic dominates (d = 512, wave),
compiled at most 2.5 times its time at d = 64; and adds at least ten times less to a step than pyrevolve.

Both sides keep 40 restart checkpoints. A tanh recurrence, batch 64, and the wave equation on a grid; each side in a
process of its own on the same cores, in turn, denormal numbers flushed to zero as XLA does. The peers need an
interpreter that has them (``pip install jax equinox pyrevolve`` in a virtual environment):

    python -m benchmarks.loop_beside --peers /path/to/venv/bin/python            # some minutes
    python -m benchmarks.loop_beside --peers /path/to/venv/bin/python --full     # 100,000 and 1,000,000 steps: hours

With pyrevolve the step is a product of a small array and a number, and its adjoint another: the time of a step less the
time of the calls is what the library adds.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
from torch import Tensor

import tapestream as ts
from benchmarks.common import (
    RESULTS,
    Row,
    Settings,
    Timings,
    forget_resident_peak,
    mebibytes,
    peak_nbytes,
    process_nbytes,
    save,
    yes,
)
from benchmarks.loop_peer import SLOTS, data, shifted
from tapestream.costs import UniformStages

TITLE = "Loop beside equinox's checkpointed while loop and pyrevolve, 40 restart checkpoints each"
Gradient = Callable[[int], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """``chunk`` steps are recorded at once, fewer where a step's tensors are large (a compiled stage consists of
    several compiled functions then); ``claims``: most of equinox's time for a bare and for a compiled step (None:
    reported without a claim)."""

    problem: str
    size: int
    steps: int
    full_steps: int
    chunk: int
    claims: dict[str, float | None]

    @property
    def name(self) -> str:
        """For the table."""
        return f"tanh d={self.size}" if self.problem == "tanh" else f"wave {self.size}x{self.size}"


_MEASURED = 10_000  # steps at most in which every allocation is noted; longer runs say how the process grew

CASES = [
    Case("tanh", 8, 10_000, 1_000_000, 128, {"bare": None, "compiled": None}),
    Case("tanh", 64, 10_000, 1_000_000, 128, {"bare": None, "compiled": 2.5}),
    Case("tanh", 512, 1_000, 100_000, 4, {"bare": 1.0}),
    Case("wave", 512, 500, 100_000, 4, {"compiled": 1.0}),
]


class Peer:
    """A library in a process of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        command = [python, str(Path(__file__).with_name("loop_peer.py")), *arguments]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def run(self, steps: int, *, show: bool = False) -> Row:
        """One gradient."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"steps": steps, "show": show}) + "\n")
        self._child.stdin.flush()
        return self._answer()

    def _answer(self) -> Row:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._child.args} ended with status {self._child.wait()}")
        found: Row = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        self._child.communicate()


def main() -> None:
    """Run and write the table."""
    given = parser().parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-given.threads :])
    torch.set_num_threads(given.threads)
    # As XLA does: gradients that have vanished are denormal numbers, which products take tens of times as long for.
    torch.set_flush_denormal(True)
    rounds = 2 if given.quick else given.rounds
    chosen = Settings("cpu", given.quick, rounds, given.threads, not given.quick, ".", given.results)
    save("loop_beside", TITLE, chosen, rows(chosen, given), full=given.full)


def rows(chosen: Settings, given: argparse.Namespace) -> Iterator[Row]:
    """A row for each problem and way."""
    for case in CASES:
        if given.only and given.only not in case.name:
            continue
        steps = 50 if chosen.quick else case.full_steps if given.full else case.steps
        yield from beside_equinox(case, steps, chosen, given.peers)
    if not given.only or given.only in "pyrevolve":
        for chunk in (1, 64):
            yield beside_pyrevolve(500 if chosen.quick else 10_000, chunk, chosen, given.peers)


def step_of(problem: str, *leaves: Tensor) -> Callable[[Any], Any]:
    """The step, in the words of PyTorch."""
    if problem == "tanh":
        weight, bias = leaves
        return lambda h: torch.tanh(torch.addmm(bias, h, weight))
    (courant,) = leaves

    def step(state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        u, before = state
        around = torch.nn.functional.pad(u, (1, 1, 1, 1))
        near = around[2:, 1:-1] + around[:-2, 1:-1] + around[1:-1, 2:] + around[1:-1, :-2]
        return 2 * u - before + courant * (near - 4 * u), u

    return step


def ours(case: Case, *, compiled: bool) -> tuple[Gradient, ts.Loop]:
    """Gradients of everything, and the loop that gives them."""
    leaves = [torch.from_numpy(array).requires_grad_() for array in data(case.problem, case.size)]
    step = step_of(case.problem, *leaves[1:])
    loop = ts.Loop(step, planner="revolve", slots=SLOTS, chunk=case.chunk, compile=compiled)

    def gradient(steps: int) -> list[Tensor]:
        if case.problem == "tanh":
            loss = loop(leaves[0], steps=steps).sum()
        else:
            loss = loop((leaves[0][0], leaves[0][1]), steps=steps)[0].sum()
        return list(torch.autograd.grad(loss, leaves))

    return gradient, loop


def beside_equinox(case: Case, steps: int, chosen: Settings, python: str) -> Iterator[Row]:
    """A row for each way of ours; all sides in turn."""
    peer = Peer(python, "equinox", case.problem, str(case.size))
    sides = {how: ours(case, compiled=how == "compiled") for how in case.claims}
    few = 130
    theirs = peer.run(few, show=True)["gradients"]
    agree = {how: agrees(gradient(few), theirs) for how, (gradient, _) in sides.items()}
    risen: dict[str, int] = {}
    timings = Timings({how: [] for how in (*sides, "equinox")}, {how: [] for how in (*sides, "equinox")})
    for number in range(-1, chosen.rounds):
        now = min(steps, _MEASURED) if number < 0 else steps  # the first round warms
        for how, (gradient, _) in sides.items():
            forget_resident_peak()
            before, wall, cpu = process_nbytes()["VmRSS"], time.perf_counter(), time.process_time()
            gradient(now)
            note(timings, how, time.perf_counter() - wall, time.process_time() - cpu, number)
            risen[how] = process_nbytes()["VmHWM"] - before
        found = peer.run(now)
        note(timings, "equinox", found["wall"], found["cpu"], number)
    peer.close()
    for how, (gradient, loop) in sides.items():
        ratio, claim = timings.ratio(how, "equinox"), case.claims[how]
        plan = loop.plan
        assert plan is not None
        measured = min(steps, _MEASURED)
        short, long = held_nbytes(gradient, max(2, measured // 4)), held_nbytes(gradient, measured)
        yield {
            "problem": case.name, "step": how, "beside": f"equinox {peer.version}", "steps": steps,
            "steps recorded at once": -(-steps // len(plan.profile)),
            "forwards a step": round(plan.simulation.forwards / len(plan.profile), 2),
            "us a step": round(timings.seconds(how) / steps * 1e6, 2),
            "its us a step": round(timings.seconds("equinox") / steps * 1e6, 2), **ratio,
            "claim": "none" if claim is None else f"at most {claim}",
            "met": "" if claim is None else yes(ratio["ratio"] <= claim), "MiB": mebibytes(long),
            "MiB at a quarter": mebibytes(short), "MiB resident, risen": mebibytes(risen[how]),
            "MiB of 40 states": mebibytes(SLOTS * data(case.problem, case.size)[0].nbytes),
            "gradients agree": yes(agree[how]),
        }  # fmt: skip


def held_nbytes(gradient: Gradient, steps: int) -> int:
    """The peak of a gradient through so many steps, once its plan is made."""
    gradient(steps)
    return peak_nbytes(lambda: gradient(steps), "cpu")


def note(timings: Timings, name: str, wall: float, cpu: float, number: int) -> None:
    """Take a time, unless the round is for warming."""
    if number >= 0:
        timings.wall[name].append(wall)
        timings.cpu[name].append(cpu)


def agrees(found: list[Tensor], theirs: list[list[float]]) -> bool:
    """To a thousandth of the largest component: the orders of summation differ."""
    for mine, other in zip(found, theirs, strict=True):
        wanted = torch.tensor(other)
        if (mine.ravel()[: len(wanted)] - wanted).abs().max() > 1e-3 * wanted.abs().max():
            return False
    return True


def beside_pyrevolve(steps: int, chunk: int, chosen: Settings, python: str) -> Row:
    """The processor time that both add to a step of a NumPy loop with its own adjoint."""
    size = 64
    peer = Peer(python, "pyrevolve", "array", str(size))
    loop = ts.Loop(shifted, adjoint=shifted, planner="revolve", slots=SLOTS, chunk=chunk)
    leaf = torch.ones(size, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(loop(leaf, steps=steps).sum(), leaf)[0]

    gradient()
    assert loop.plan is not None
    here = round(loop.plan.simulation.forwards / len(loop.plan.profile) * steps) + steps
    profile = ts.Profile(UniformStages(ts.StageCost(1.0, 1.0, 1, 1), steps), 1)
    there = ts.simulate(ts.planners["revolve"](profile, None, None, slots=SLOTS), profile).forwards + steps
    added, theirs = [], []
    for number in range(-1, chosen.rounds):
        bare = bare_seconds(size, steps)
        cpu = time.process_time()
        gradient()
        cpu = time.process_time() - cpu
        found = peer.run(steps)
        if number >= 0:
            added.append((cpu - here * bare) / steps)
            theirs.append((found["cpu"] - there * bare) / steps)
    same = numpy.allclose(gradient().numpy(), peer.run(steps, show=True)["gradients"][0])
    peer.close()
    ratio = median(a / b for a, b in zip(added, theirs, strict=True))
    return {
        "problem": f"array of {size}", "step": "NumPy", "beside": f"pyrevolve {peer.version}", "steps": steps,
        "steps recorded at once": chunk, "us a step": round(median(added) * 1e6, 2),
        "its us a step": round(median(theirs) * 1e6, 2), "ratio": round(ratio, 4), "claim": "at most 0.1 (added)",
        "met": yes(ratio <= 0.1), "gradients agree": yes(bool(same)),
    }  # fmt: skip


def bare_seconds(size: int, steps: int) -> float:
    """Processor time of one call of the step."""
    state = numpy.ones(size, "f4")
    began = time.process_time()
    for _ in range(steps):
        state = shifted(state)
    return (time.process_time() - began) / steps


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser()
    made.add_argument("--peers", required=True, help="a Python that has jax, equinox and pyrevolve")
    made.add_argument("--only", default="", help="problems whose name has this in it")
    made.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    made.add_argument("--full", action="store_true", help="100,000 and 1,000,000 steps")
    made.add_argument("--rounds", type=int, default=5, help="rounds A B A B ...")
    made.add_argument("--threads", type=int, default=1, help="cores of each side")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file (%(default)s)")
    return made


if __name__ == "__main__":
    main()
