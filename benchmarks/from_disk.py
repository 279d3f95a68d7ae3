"""Claim (c): with parameters and optimizer state at home on a slower tier, a step takes at most 1.25 times the longer
of computing (everything resident, plain PyTorch) and moving (the bytes that it moved, at the measured speed of the
link).

Bytes moved are compared with a lower bound. Let P, S, G be the bytes of parameters, optimizer state and gradients of
the blocks, and H the budget less what lies outside blocks. At the boundary of two phases at most H bytes of blocks can
be on the device, at the turn (after the last forward) at most H' = H less the loss's working set and the last state.
What a phase needs and was not there at its start has to be read; what it changed and is not there at its end has to be
written:

    update="backward": forward reads P - H; backward reads P + S - H' and writes P + S - H
    update="step":     forward reads P - H; backward reads P - H' and writes G - H; step reads P + S + G - H and
                       writes P + S - H

each at least 0. No schedule moves less; the bound may be out of reach where the tape takes part of H.
"""

import tempfile
from collections.abc import Mapping
from statistics import quantiles
from typing import Literal

import torch

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
    save(
        name, TITLE, chosen, rows, home=home, optimizer="AdamW (fused)", lower_bound=(__doc__ or "").split("\n\n", 1)[1]
    )


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
        peak = streamed_peak_nbytes(network, ours, case.device)
        theirs()
        equal = same_bits(list(plain.parameters()), list(network.parameters()))
        ts.unstream(network)
    least, moved = least_moved(report.plan, update), sum(report.bytes_moved.values())
    found = _figures(timings, link_seconds(report.bytes_moved, machine))
    return {
        **row, "peak MiB": mebibytes(peak), "within": yes(peak <= budget), **found,
        "waited ms": milliseconds(report.wait_seconds), "planned ms": milliseconds(report.plan.seconds),
        "claim": "at most 1.25", "met": yes(found["ratio"] <= 1.25), "moved MiB": mebibytes(moved),
        "least MiB": mebibytes(least), "moved over least": round(moved / max(1, least), 4),
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


def least_moved(plan: ts.Plan, update: Update) -> int:
    """The lower bound above, in bytes, both directions together."""
    profile, limit = plan.profile, plan.budget.device_nbytes
    assert limit is not None
    room = limit - profile.outside_nbytes
    at_turn = room - profile.turn_nbytes - profile.state_nbytes(len(profile))
    parameters = sum(block.parameters_nbytes for block in profile.blocks)
    gradients = sum(block.gradient_nbytes for block in profile.blocks)
    both = parameters + sum(block.optimizer_state_nbytes for block in profile.blocks)
    if update == "backward":
        moves = [parameters - room, both - at_turn, both - room]
    else:
        moves = [parameters - room, parameters - at_turn, gradients - room, gradients + both - room, both - room]
    return sum(max(0, nbytes) for nbytes in moves)


if __name__ == "__main__":
    main()
