"""Claim (c): with parameters and optimizer state at home on a slower tier, a step takes at most 1.25 times the longer
of computing (everything resident, plain PyTorch) and moving (the bytes that it moved, at the measured speed of the
link), and moves at most 1.05 times the least bytes possible within the budget with the tape that the plan keeps
(`benchmarks.least_moved` derives that bound). "any tape" is a bound for every tape, in general out of reach.
"""

import tempfile
from collections.abc import Mapping
from statistics import quantiles
from typing import Literal

import torch

import benchmarks.least_moved
import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    Timings,
    alternate,
    mebibytes,
    milliseconds,
    same_bits,
    save,
    settings,
    streamed_peak_nbytes,
    yes,
)
from benchmarks.everything_fits import stepper
from benchmarks.least_moved import least_moved, least_with_any_tape
from benchmarks.networks import Case, gpt

TITLE = "Training with parameters and optimizer state at home on a slower tier"
Update = Literal["backward", "step"]


def main(device: str = "cpu", name: str = "from_disk", home: str = "disk") -> None:
    """Measure all models, budgets and modes of update."""
    chosen = settings(device, rounds=5)
    ways: tuple[Update, ...] = ("backward", "step")
    rows = (
        measure(case, share, update, home, chosen)
        for case in _cases(chosen)
        for share in ((0.5,) if chosen.quick else (0.25, 0.5))
        for update in ways
    )
    save(name, TITLE, chosen, rows, home=home, optimizer="AdamW (fused)", lower_bound=benchmarks.least_moved.__doc__)


def _cases(chosen: Settings) -> list[Case]:
    device = chosen.device
    if chosen.quick:
        return [gpt(6, 128, 2, 64, device)]
    if device == "cuda":
        return [gpt(16, 2048, 8, 1024, device), gpt(16, 2048, 32, 1024, device)]
    return [gpt(8, 512, 4, 128, device), gpt(6, 1024, 1, 128, device)]


def measure(case: Case, share: float, update: Update, home: str, chosen: Settings) -> Row:
    """One row; the link is measured right before."""
    budget = round(share * sum(4 * p.nbytes for p in case.network().parameters()))
    row: Row = {
        "network": case.name, "budget": f"{share:.0%} of the training state", "budget MiB": mebibytes(budget),
        "update": update,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        machine = ts.measure_machine(chosen.device, folder)

        network, plain = case.network(), case.network()
        ts.stream(
            network, device=case.device, budget=budget, home=home, folder=folder if home == "disk" else None,
            machine=machine,
        )  # fmt: skip
        ours = stepper(network, case, ts.optimizer(network, torch.optim.AdamW, update=update, fused=True))
        try:
            ours()
        except ts.BudgetError as error:
            return {**row, "peak MiB": f"needs {mebibytes(error.least_nbytes or 0)}", "met": "no"}
        theirs = stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True))
        timings = alternate({"plain": theirs, "ours": ours}, chosen.rounds, case.device)
        theirs()
        ts.report(network)  # counts from here
        ours()
        theirs()
        report = ts.report(network)
        peak = streamed_peak_nbytes(network, ours, case.device)  # two steps
        theirs()
        theirs()
        equal = same_bits(list(plain.parameters()), list(network.parameters()))
        ts.unstream(network)
    least, moved = least_moved(report.plan), sum(report.bytes_moved.values())
    found = _figures(timings, link_seconds(report.bytes_moved, machine))
    return {
        **row, "peak MiB": mebibytes(peak), "within": yes(peak <= budget), **found,
        "waited ms": milliseconds(report.wait_seconds), "planned ms": milliseconds(report.plan.seconds),
        "claim": "at most 1.25", "met": yes(found["ratio"] <= 1.25), "moved MiB": mebibytes(moved),
        "least MiB": mebibytes(least), "any tape MiB": mebibytes(least_with_any_tape(report.plan, update)),
        "moved over least": round(moved / max(1, least), 4),
        "moved claim": "at most 1.05", "moved met": yes(moved <= 1.05 * least), "same bits": yes(equal),
    }  # fmt: skip


def _figures(timings: Timings, link: float) -> Row:
    ratios = [ours / max(plain, link) for ours, plain in zip(timings.wall["ours"], timings.wall["plain"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return {
        "ms": milliseconds(timings.seconds("ours")), "plain, resident ms": milliseconds(timings.seconds("plain")),
        "link ms": milliseconds(link), "ratio": round(middle, 4), "quartiles": f"{low:.3f} to {high:.3f}",
    }  # fmt: skip


def link_seconds(moved: Mapping[tuple[ts.Tier, ts.Tier], int], machine: ts.Machine) -> float:
    """Seconds that the busiest pair of opposite lanes needs: both at their mixed speeds, then the rest alone."""
    needs = []
    for (source, target), up in moved.items():
        if source > target:
            down = moved.get((target, source), 0)
            reading, writing = machine.link(source, target), machine.link(target, source)
            both = min(up / reading.mixed, down / writing.mixed)
            needs.append(
                both
                + (up - both * reading.mixed) / reading.bytes_per_second
                + (down - both * writing.mixed) / writing.bytes_per_second
            )
    return max(needs, default=0.0)


if __name__ == "__main__":
    main()
