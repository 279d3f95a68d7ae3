"""Claim: several processes that divide a model take no more memory and time than DeepSpeed's ZeRO-3 with CPU offload.

On gloo, each rank with a batch of its own and one thread; DeepSpeed as in `benchmarks.beside_deepspeed`, which says how
to install it. A rank's memory is measured as `benchmarks.peer` says, all ranks of one side at a time: theirs is the
least of any rank, which gives ours its budget, and ours the most. ``plain`` is DistributedDataParallel, whose bits
weights are compared with after all steps: of two ranks, since with more its sums have other bits. On as many ranks as
the machine has cores, and on more, which take turns.
"""

import argparse
import tempfile
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import cast

import torch
from torch import nn

import tapestream as ts
from benchmarks.beside_deepspeed import OPTIMIZERS, is_installed, prepare, trained
from benchmarks.common import Row, Settings, Timings, alternate, mebibytes, milliseconds, same_bits, save, settings, yes
from benchmarks.networks import Case, Network, gpt
from benchmarks.peer import TINY, Step, is_child, step_nbytes, tell, told_by_child
from benchmarks.ranks import batch_of, in_ranks, stepper

TITLE = "Several processes, beside DeepSpeed's ZeRO-3 with CPU offload on gloo, at no more memory than it takes"
PLAIN, THEIRS = "DistributedDataParallel", "DeepSpeed"
HOMES = {"ts.stream, divided, in memory": ("device", 1), "ts.stream, divided, on disk in half its memory": ("disk", 2)}
"""Where blocks are, and which part of the other's memory the budget is: in all of it, none need come from disk."""


def main() -> None:
    """Measure on two and four ranks, or in a child process the memory of one side."""
    if is_child():
        _child()
        return
    chosen = settings(rounds=7)
    if not is_installed():
        return
    each = ((ranks, way) for ranks in ((2,) if chosen.quick else (2, 4)) for way in OPTIMIZERS)
    rows = (row for ranks, way in each for row in measure(ranks, way, chosen))
    save("ranks_deepspeed", TITLE, chosen, rows, deepspeed=metadata.version("deepspeed"), optimizer="AdamW (fused)")


def measure(ranks: int, way: str, chosen: Settings) -> list[Row]:
    """A row for each home of ours, beside one of DeepSpeed's optimizers."""
    theirs = _held(ranks, way, 0, chosen)
    ours = {name: _held(ranks, home, theirs // part, chosen) for name, (home, part) in HOMES.items()}
    rows, *_ = in_ranks(ranks, chosen.folder, _measured, way, {THEIRS: theirs, **ours}, chosen)
    return cast("list[Row]", rows)


def case_of(quick: bool) -> Case:
    """That of `benchmarks.ranks_gloo`."""
    return gpt(4, 64, 2, 32, "cpu") if quick else gpt(6, 512, 4, 128, "cpu")


def our_step(rank: int, case: Case, network: Network, home: str, budget: int, folder: str) -> Step:
    """A step of one rank with AdamW, blocks at ``home`` divided among all."""
    ts.stream(
        network, device="cpu", budget=budget, home=home, folder=Path(folder) if home == "disk" else None,
        peers=ts.Peers(shard=True),
    )  # fmt: skip
    return stepper(rank, case, network, ts.optimizer(network, torch.optim.AdamW, fused=True))


def _measured(rank: int, ranks: int, folder: str, way: str, held: dict[str, int], chosen: Settings) -> list[Row]:
    """Rows of one rank. ``held``: bytes of each side, of which the other's gives ours its budget."""
    prepare(rank, ranks)
    case = case_of(chosen.quick)
    networks = {name: case.network() for name in (PLAIN, *held)}
    averaged = nn.parallel.DistributedDataParallel(networks[PLAIN])
    running = trained(networks[THEIRS], batch_of(rank, case), way)
    steps = {
        PLAIN: stepper(rank, case, averaged, torch.optim.AdamW(averaged.parameters(), fused=True)),
        THEIRS: running.step,
    }
    with ExitStack() as undo:
        undo.callback(running.close)
        for name, (home, part) in HOMES.items():
            steps[name] = our_step(rank, case, networks[name], home, held[THEIRS] // part, folder)
            undo.callback(ts.unstream, networks[name])
        timings = alternate({name: _together(step) for name, step in steps.items()}, chosen.rounds, "cpu")
        reference, same = list(networks[PLAIN].parameters()), {}
        with running.readable(networks[THEIRS]):
            same[THEIRS] = same_bits(reference, list(networks[THEIRS].parameters()))
        for name in HOMES:
            with ts.whole(networks[name]):
                same[name] = same_bits(reference, list(networks[name].parameters()))
    named = {"network": case.name, "ranks": ranks, "its optimizer": way}
    return [{**named, **_figures(name, held, timings, same if ranks == 2 else {})} for name in HOMES]


def _figures(name: str, held: dict[str, int], timings: Timings, same: dict[str, bool]) -> Row:
    """Of one home of ours; bits where they can be the same."""
    found = timings.ratio(name, THEIRS)
    row = {
        "with": name, "its MiB": mebibytes(held[THEIRS]), "MiB": mebibytes(held[name]),
        "plain ms": milliseconds(timings.seconds(PLAIN)), "its ms": milliseconds(timings.seconds(THEIRS)),
        "ms": milliseconds(timings.seconds(name)), **found, "claim": "at most 1.00",
        "met": yes(found["ratio"] <= 1.0 and held[name] <= held[THEIRS]),
    }  # fmt: skip
    if same:
        row |= {"its bits same as plain": yes(same[THEIRS]), "ours same as plain": yes(same[name])}
    return row


def _together(step: Step) -> Step:
    """The step, which ends on all ranks at once: what one does late is not the next contender's."""

    def run() -> None:
        step()
        torch.distributed.barrier()

    return run


def _held(ranks: int, side: str, budget: int, chosen: Settings) -> int:
    """Bytes that a rank holds at its peak: of theirs the least of all ranks, of ours the most."""
    return told_by_child("benchmarks.ranks_deepspeed", (side, ranks, budget), chosen.quick, {"TMPDIR": chosen.folder})


def _child() -> None:
    """Print the bytes of one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", nargs=3)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    side, ranks, budget = given.memory[0], int(given.memory[1]), int(given.memory[2])
    held = in_ranks(ranks, tempfile.gettempdir(), _held_by_rank, side, budget, given.quick)
    tell(min(held) if side in OPTIMIZERS else max(held))


def _held_by_rank(rank: int, ranks: int, folder: str, side: str, budget: int, quick: bool) -> int:
    def make(case: Case, budget: int) -> Step:
        if side in OPTIMIZERS:
            return trained(case.network(), batch_of(rank, case), side).step
        return our_step(rank, case, case.network(), side, budget, folder)

    if side in OPTIMIZERS:
        prepare(rank, ranks)
    make(TINY, 2**30)()
    return step_nbytes(lambda: make(case_of(quick), budget))


if __name__ == "__main__":
    main()
