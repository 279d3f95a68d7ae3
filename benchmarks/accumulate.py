"""Claim: with a home on disk and eight micro-batches a step, `ts.accumulate` takes at most half the time of one call
and one ``backward()`` after the other, of the same streamed model within the same budget, with the same bits.
"gradients" is the same without the optimizer's step, which moves the state of AdamW in both.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import nn

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
from benchmarks.networks import Case, gpt

TITLE = "Eight micro-batches a step, parameters and optimizer state on disk: block by block, and one after the other"
_COUNT = 8

Batch = tuple[torch.Tensor, ...]
Accumulate = Callable[[nn.Module, Sequence[Batch], Callable[[torch.Tensor, Batch], torch.Tensor]], object]


def main() -> None:
    """Measure all models and budgets."""
    chosen = settings(rounds=5)
    rows = (measure(case, share, chosen) for case in _cases(chosen) for share in (0.2, 0.3))
    save("accumulate", TITLE, chosen, rows, home="disk", optimizer="AdamW (fused)", micro_batches=_COUNT)


def _cases(chosen: Settings) -> list[Case]:
    if chosen.quick:
        return [gpt(6, 128, _COUNT, 16, "cpu")]
    return [gpt(6, 1024, _COUNT, 8, "cpu"), gpt(6, 1024, _COUNT, 32, "cpu")]


def one_by_one(
    model: nn.Module, micro_batches: Sequence[Batch], loss: Callable[[torch.Tensor, Batch], torch.Tensor]
) -> None:
    """What `accumulate` stands for."""
    for one in micro_batches:
        loss(model(*one), one).backward()  # type: ignore[no-untyped-call]


def measure(case: Case, share: float, chosen: Settings) -> Row:
    """One row."""
    budget = round(share * sum(4 * p.nbytes for p in case.network().parameters()))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        machine = ts.measure_machine("cpu", folder)
        sides = [_Side(case, way, budget, machine, folder) for way in (ts.accumulate, one_by_one)]
        ours, theirs = sides
        timings = alternate({"ours": ours.step, "theirs": theirs.step}, chosen.rounds, "cpu", warm=2)
        moved = [side.moved() for side in sides]
        order = ts.report(ours.model).accumulation or ""
        peak = streamed_peak_nbytes(ours.model, ours.step, "cpu")  # two steps
        theirs.step()
        theirs.step()
        equal = same_bits(list(ours.model.parameters()), list(theirs.model.parameters()))
        for side in sides:
            ts.unstream(side.model)
    found = timings.ratio("ours", "theirs")
    return {
        "network": case.name, "budget": f"{share:.0%} of the training state", "budget MiB": mebibytes(budget),
        "peak MiB": mebibytes(peak), "within": yes(peak <= budget),
        "ms": milliseconds(timings.seconds("ours")), "one by one ms": milliseconds(timings.seconds("theirs")),
        **found, "gradients, ratio": round(median(ours.seconds) / median(theirs.seconds), 4),
        "moved MiB": mebibytes(moved[0]), "one by one moved MiB": mebibytes(moved[1]),
        "order": order, "claim": "at most 0.5", "met": yes(found["ratio"] <= 0.5), "same bits": yes(equal),
    }  # fmt: skip


class _Side:
    """A streamed model that takes its steps in one way. ``seconds``: of the gradients of each."""

    def __init__(self, case: Case, way: Accumulate, budget: int, machine: ts.Machine, folder: str) -> None:
        self.model, self._way = case.network(), way
        ts.stream(self.model, budget=budget, home="disk", folder=tempfile.mkdtemp(dir=folder), machine=machine)
        self._optimizer = ts.optimizer(self.model, torch.optim.AdamW, fused=True)
        x, targets = case.batch()
        self._batches = [*zip(x.chunk(_COUNT), targets.chunk(_COUNT), strict=True)]
        self.seconds = list[float]()

    def step(self) -> None:
        """One step of the optimizer."""
        began = time.perf_counter()
        self._way(self.model, self._batches, lambda loss, _: loss / _COUNT)
        self.seconds.append(time.perf_counter() - began)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def moved(self) -> int:
        """Bytes that one step moves."""
        ts.report(self.model)  # counts from here
        self.step()
        return sum(ts.report(self.model).bytes_moved.values())


if __name__ == "__main__":
    main()
