"""Claim (e): batches of random lengths stay within the budget and cost at most 10% more than with all plans made before.

Lengths are drawn evenly between 64 and 1,024. The first pass meets each length as it comes; the second has the same
lengths and every plan. Peaks are measured at the longest, at a middle and at the shortest length, with all plans made.
"""

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

import tapestream as ts
from benchmarks.common import (
    Row, Settings, mebibytes, milliseconds, peak_nbytes, save, settings, streamed_peak_nbytes, synchronize, yes,
)  # fmt: skip
from benchmarks.networks import Case, Network, gpt

TITLE = "Random sequence lengths, plans made as they come, against plans made before"
Step = Callable[[int], None]


def main(device: str = "cpu", name: str = "random_lengths") -> None:
    """Measure Chain and stream."""
    chosen = settings(device, rounds=1)
    count, longest = (10, 128) if chosen.quick else (200, 1024)
    case = gpt(2 if chosen.quick else 6, 128, 1, longest, device)
    lengths = random.Random(0).choices(range(64, longest + 1), k=count)
    rows = [_chain_row(case, lengths, chosen), _stream_row(case, lengths, chosen)]
    save(name, TITLE, chosen, rows, network=case.name, batches=count, lengths=f"64 to {longest}")


def _chain_row(case: Case, lengths: list[int], chosen: Settings) -> Row:
    network = case.network()
    step = _step(network, case, network.run_blocks)
    network.zero_grad()
    full = peak_nbytes(lambda: step(max(lengths)), case.device)
    gradients = sum(p.nbytes for p in network.parameters())
    # The budget covers what the chain holds; gradients, embeddings and logits lie beside it.
    beside = full - _chain_store_all(network, case, max(lengths))
    budget = (full - beside) // 2 + gradients
    chain = ts.Chain(list(network.blocks), budget=budget)
    step = _step(network, case, chain)
    row = _passes("ts.Chain", step, lengths, chosen)
    peaks = [(n, _chain_peak(network, chain, case, n)) for n in _probes(lengths)]
    return {**row, **_within(peaks, budget)}
