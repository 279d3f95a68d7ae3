"""Claim: without gradients, and with parameters at home on a slower tier, a call takes at most 1.10 times the longer of
computing (everything resident, plain PyTorch) and moving (as many bytes as it moved, read block by block and nothing
else). All three take turns, each after a second of rest, and a round's ratio is of its own three: a disk that others
use changes by the second, and lends speed that what comes next has to give back.

Long calls compute longer than they move; a call on few tokens, as in decoding, is all moving: there a part of the
blocks stays on the device, and the bytes moved stand beside the least that a cyclic scan within the budget can move.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import torch

import tapestream as ts
from benchmarks.common import (
    Row,
    Run,
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
from benchmarks.networks import Case, Network, gpt
from tapestream.frontends.module.stream import handle_of
from tapestream.storage.transfer import aligned_empty

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
    """One row."""
    network, plain = case.network().eval(), case.network().eval()
    batch, budget = case.batch(), round(share * sum(p.nbytes for p in plain.parameters()))
    for p in (*network.parameters(), *plain.parameters()):
        p.requires_grad_(False)
    block = sum(p.nbytes for p in plain.blocks[0].parameters())
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder, torch.no_grad():
        machine = ts.measure_machine(chosen.device, folder)
        ts.stream(
            network, device=case.device, budget=budget, home=home,
            folder=folder if home == "disk" else None, machine=machine,
        )  # fmt: skip
        # Three calls unmeasured: one measures bytes, in the next two some blocks come to stay.
        for _ in range(3):
            network(*batch)
        moved = -_moved(network)
        network(*batch)
        moved += _moved(network)
        with mover(moved, block, home, Path(folder)) as move:
            timings = alternate(
                {"plain": lambda: plain(*batch), "link": move, "ours": lambda: network(*batch)},
                chosen.rounds, case.device, rest=0.0 if chosen.quick else 1.0,
            )  # fmt: skip
        peak = streamed_peak_nbytes(network, lambda: network(*batch), case.device)
        equal = same_bits([plain(*batch)], [network(*batch)])
        ts.unstream(network)
    wall = timings.wall
    ratios = [a / max(b, c) for a, b, c in zip(wall["ours"], wall["plain"], wall["link"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "network": case.name, "budget": f"{share:.0%} of the parameters", "budget MiB": mebibytes(budget),
        "peak MiB": mebibytes(peak), "within": yes(peak <= budget),
        "ms": milliseconds(timings.seconds("ours")), "plain, resident ms": milliseconds(timings.seconds("plain")),
        "link ms": milliseconds(timings.seconds("link")), "ratio": round(median(ratios), 4),
        "quartiles": f"{low:.3f} to {high:.3f}",
        "claim": "at most 1.10", "met": yes(median(ratios) <= 1.10), "moved MiB": mebibytes(moved),
        "least MiB": mebibytes(_least(network, block, budget)), "same bits": yes(equal),
    }  # fmt: skip


@contextmanager
def mover(nbytes: int, block: int, home: str, folder: Path) -> Iterator[Run]:
    """Moves so many bytes, ``block`` by ``block``, as fast as the link is: from the files of ``folder``, past the page
    cache, into RAM of large pages, or from page-locked RAM to the GPU."""
    pieces, whole = [block] * (nbytes // block) + [nbytes % block] * (nbytes % block > 0), aligned_empty(2 * block)
    buffers = [whole[:block], whole[block:]]
    if home != "disk":
        pinned, onto = whole.pin_memory(), torch.empty(block, dtype=torch.uint8, device="cuda")

        def copy() -> None:
            for number, piece in enumerate(pieces):
                onto[:piece].copy_(pinned[number % 2 * block :][:piece], non_blocking=True)

        yield copy
        return
    paths = [path for path in sorted(folder.rglob("extent-*")) if path.stat().st_size >= block]
    files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]

    def read() -> None:
        for number, piece in enumerate(pieces):
            done = os.preadv(files[number % len(files)], [buffers[number % 2].numpy().data[:piece]], 0)
            assert done == piece, f"{paths[number % len(files)]} gave {done} of {piece} bytes"

    try:
        yield read
    finally:
        for file in files:
            os.close(file)


def _moved(network: Network) -> int:
    return sum(handle_of(network).engine.statistics().bytes_moved.values())


def _least(network: Network, block: int, budget: int) -> int:
    """Each call needs every block: at most what the budget holds beside one that comes can be there already."""
    outside = sum(p.nbytes for p in network.parameters()) - block * len(network.blocks)
    return max(0, block * len(network.blocks) - max(0, budget - outside))


if __name__ == "__main__":
    main()
