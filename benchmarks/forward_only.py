"""Claim: without gradients, and with parameters at home on a slower tier, a call takes at most 1.10 times the longer of
computing (everything resident, plain PyTorch) and moving (the bytes that it moved, at the measured speed of the link).

Long calls compute longer than they move; a call on few tokens, as in decoding, is all moving: there a part of the
blocks stays on the device, and the bytes moved stand beside the least that a cyclic scan within the budget can move.
"""

import tempfile
from statistics import median, quantiles

import torch

import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    alternate,
    mebibytes,
    milliseconds,
    same_bits,
    save,
    settings,
    streamed_peak_nbytes,
    yes,
)
from benchmarks.from_disk import link_seconds
from benchmarks.networks import Case, Network, gpt
from tapestream.frontends.module.stream import handle_of

TITLE = "Calls without gradients, parameters at home on a slower tier"


def main(device: str = "cpu", name: str = "forward_only", home: str = "disk") -> None:
    """Measure all models and budgets."""
    chosen = settings(device, rounds=9)
    shares = (0.5,) if chosen.quick else (0.3, 0.6)
    save(name, TITLE, chosen, (measure(c, s, home, chosen) for c in _cases(chosen) for s in shares), home=home)


def _cases(chosen: Settings) -> list[Case]:
    device = chosen.device
    if chosen.quick:
        return [gpt(8, 128, 2, 64, device)]
    if device == "cuda":
        return [gpt(24, 2048, 8, 1024, device), gpt(24, 2048, 1, 16, device)]
    return [gpt(24, 512, 4, 128, device), gpt(16, 1024, 1, 128, device), gpt(16, 1024, 1, 4, device)]


def measure(case: Case, share: float, home: str, chosen: Settings) -> Row:
    """One row; the link is measured right before."""
    network, plain = case.network().eval(), case.network().eval()
    batch, budget = case.batch(), round(share * sum(p.nbytes for p in plain.parameters()))
    for p in (*network.parameters(), *plain.parameters()):
        p.requires_grad_(False)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder, torch.no_grad():
        machine = ts.measure_machine(chosen.device, folder)
        ts.stream(
            network, device=case.device, budget=budget, home=home,
            folder=folder if home == "disk" else None, machine=machine,
        )  # fmt: skip
        # Three calls unmeasured: one measures bytes, in the next two some blocks come to stay.
        timings = alternate(
            {"plain": lambda: plain(*batch), "ours": lambda: network(*batch)}, chosen.rounds, case.device, warm=4
        )
        moved = _moved(network)
        network(*batch)
        moved = {lane: n - moved.get(lane, 0) for lane, n in _moved(network).items()}
        peak = streamed_peak_nbytes(network, lambda: network(*batch), case.device)
        equal = same_bits([plain(*batch)], [network(*batch)])
        ts.unstream(network)
    link, block = link_seconds(moved, machine), sum(p.nbytes for p in plain.blocks[0].parameters())
    ratios = [a / max(b, link) for a, b in zip(timings.wall["ours"], timings.wall["plain"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "network": case.name, "budget": f"{share:.0%} of the parameters", "budget MiB": mebibytes(budget),
        "peak MiB": mebibytes(peak), "within": yes(peak <= budget),
        "ms": milliseconds(timings.seconds("ours")), "plain, resident ms": milliseconds(timings.seconds("plain")),
        "link ms": milliseconds(link), "ratio": round(median(ratios), 4), "quartiles": f"{low:.3f} to {high:.3f}",
        "claim": "at most 1.10", "met": yes(median(ratios) <= 1.10), "moved MiB": mebibytes(sum(moved.values())),
        "least MiB": mebibytes(_least(network, block, budget)), "same bits": yes(equal),
    }  # fmt: skip


def _moved(network: Network) -> dict[tuple[ts.Tier, ts.Tier], int]:
    return dict(handle_of(network).engine.statistics().bytes_moved)


def _least(network: Network, block: int, budget: int) -> int:
    """Each call needs every block: at most what the budget holds beside one that comes can be there already."""
    outside = sum(p.nbytes for p in network.parameters()) - block * len(network.blocks)
    return max(0, block * len(network.blocks) - max(0, budget - outside))


if __name__ == "__main__":
    main()
