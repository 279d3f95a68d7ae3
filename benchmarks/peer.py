"""What the benchmarks beside a peer share: two GPTs, both sides at the peer's own memory, one row of the table.

Memory is what a process holds resident at the peak of a step beyond what it held before the model was made, each side
in a process of its own; that of the peer is the budget of ours. Times are taken in turn in one process.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    alternate,
    forget_resident_peak,
    mebibytes,
    milliseconds,
    process_nbytes,
    same_bits,
    yes,
)
from benchmarks.everything_fits import stepper
from benchmarks.networks import Case, Network, gpt

Step = Callable[[], None]
TINY = gpt(2, 64, 2, 32, "cpu")
"""Trained first where memory is measured: what PyTorch and a peer take once started is not of the model."""


@dataclass(frozen=True, slots=True)
class Running:
    """A peer that trains: its step, its end, and a context in which its parameters can be read."""

    step: Step
    close: Callable[[], object]
    readable: Callable[[nn.Module], AbstractContextManager[object]] = lambda network: nullcontext()


@dataclass(frozen=True, slots=True)
class Peer:
    """A library beside which we are measured, in each of its ``ways``.

    ``start(network, case, way)`` makes it train; ``prepare`` is called once in each process; ``module`` is the
    benchmark that runs as the child in which memory is measured, with ``environment``.
    """

    name: str
    module: str
    column: str
    ways: tuple[str, ...]
    start: Callable[[Network, Case, str], Running]
    prepare: Callable[[], None]
    environment: Callable[[], dict[str, str]] = dict


def cases(quick: bool) -> list[Case]:
    """The networks of the table."""
    return [gpt(4, 64, 2, 32, "cpu")] if quick else [gpt(6, 512, 4, 128, "cpu"), gpt(6, 512, 1, 64, "cpu")]


def measure(peer: Peer, case: Case, way: str, chosen: Settings) -> Row:
    """One way of the peer and ours."""
    theirs_nbytes = _resident(peer, chosen.quick, case, way, 0)
    ours_nbytes = _resident(peer, chosen.quick, case, "ours", theirs_nbytes)
    plain, network, other = case.network(), case.network(), case.network()
    running = peer.start(other, case, way)
    steps = {
        "plain": stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True)),
        "ours": our_step(network, case, theirs_nbytes),
        peer.name: running.step,
    }
    timings = alternate(steps, chosen.rounds, "cpu")
    reference, found = list(plain.parameters()), timings.ratio("ours", peer.name)
    with running.readable(other):
        theirs_same = same_bits(reference, list(other.parameters()))
    running.close()
    return {
        "network": case.name, peer.column: way, "its MiB": mebibytes(theirs_nbytes),
        "MiB": mebibytes(ours_nbytes), "plain ms": milliseconds(timings.seconds("plain")),
        "its ms": milliseconds(timings.seconds(peer.name)), "ms": milliseconds(timings.seconds("ours")), **found,
        "claim": "at most 1.00", "met": yes(found["ratio"] <= 1.0 and ours_nbytes <= theirs_nbytes),
        "its bits same as plain": yes(theirs_same),
        "ours same as plain": yes(same_bits(reference, list(network.parameters()))),
    }  # fmt: skip


def our_step(network: Network, case: Case, budget: int) -> Step:
    """A step of the streamed model with AdamW."""
    ts.stream(network, device="cpu", budget=budget)
    return stepper(network, case, ts.optimizer(network, torch.optim.AdamW, fused=True))


def is_child() -> bool:
    """Whether this process was started to measure the memory of one side."""
    return "--memory" in sys.argv


def child(peer: Peer) -> None:
    """Print the bytes of one side: how the process started by `measure` answers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    side, case, budget = given.memory[0], cases(given.quick)[int(given.memory[1])], int(given.memory[2])
    torch.set_num_threads(1)
    if side != "ours":
        peer.prepare()
    our_step(TINY.network(), TINY, 2**30)()
    if side != "ours":
        peer.start(TINY.network(), TINY, side).step()

    def make() -> Step:
        network = case.network()
        return our_step(network, case, budget) if side == "ours" else peer.start(network, case, side).step

    tell(step_nbytes(make))


def step_nbytes(make: Callable[[], Step]) -> int:
    """Bytes resident at the peak of the third step that ``make`` gives, beyond what this process held before."""
    before = process_nbytes()["VmRSS"]
    step = make()
    step()
    step()
    forget_resident_peak()
    step()
    return process_nbytes()["VmHWM"] - before


def tell(nbytes: int) -> None:
    """Answer `told_by_child`, as the child."""
    print("bytes", nbytes)


def told_by_child(module: str, given: Sequence[object], quick: bool, environment: Mapping[str, str]) -> int:
    """Bytes that a benchmark answers ``--memory GIVEN..``, as a child process in which malloc returns what is freed."""
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", module, "--memory", *map(str, given), *(["--quick"] if quick else [])]
    found = subprocess.run(
        command, env={**os.environ, **malloc, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(next(line for line in found.stdout.splitlines() if line.startswith("bytes ")).split()[1])


def _resident(peer: Peer, quick: bool, case: Case, side: str, budget: int) -> int:
    """Bytes of one side."""
    index = [known.name for known in cases(quick)].index(case.name)
    return told_by_child(peer.module, (side, index, budget), quick, peer.environment())
