"""Claim (b): at the same measured peak, `ts.Chain` is no slower than PyTorch's `checkpoint_sequential` at its best.

Every number of segments, reentrant and not, is run: its peak is measured, and it is timed. Ours then gets the largest
budget whose measured peak is no higher than a peak of theirs, and is timed in turn with the fastest two of theirs that
stay within that peak. Peaks count everything beyond weights and batch: tape, gradients, workspaces; so does the budget
of ours (``gradients_within``), as far as the chain is concerned.
"""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    Workload,
    alternate,
    mebibytes,
    milliseconds,
    peak_nbytes,
    same_bits,
    save,
    settings,
    yes,
)
from benchmarks.networks import Case, Network, gpt, pyramid, resnet

TITLE = "Step time at equal measured peak, against the best checkpoint_sequential"
_PEAKS = 4  # compared, spread over the range of theirs
_RIVALS = 2  # timed in turn with ours at each peak


@dataclass(frozen=True, slots=True)
class Rival:
    """One way to call checkpoint_sequential."""

    segments: int
    reentrant: bool
    step: Callable[[], None]
    peak_nbytes: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.segments} segments, use_reentrant={self.reentrant}"


def main(device: str = "cpu", name: str = "equal_peak") -> None:
    """Measure all networks."""
    chosen = settings(device, rounds=7)
    rows = (row for case in _cases(chosen) for row in measure(case, chosen))
    save(name, TITLE, chosen, rows, peaks=_PEAKS, rivals_at_each_peak=_RIVALS)


def _cases(chosen: Settings, part: int = 1) -> list[Case]:
    device = chosen.device
    if chosen.quick:
        return [gpt(4, 64, 2, 64, device), resnet(2, 4, device), pyramid(2, 16, device)]
    return [gpt(12, 256, 8 // part, 128, device), resnet(18, 16 // part, device), pyramid(16 // part, 32, device)]


def measure(case: Case, chosen: Settings) -> list[Row]:
    """Rows for a few peaks of theirs."""
    network = case.network()
    rivals = rivals_of(network, case)
    seconds = first_look(rivals, chosen)
    rows = []
    for limit in _spread(sorted({r.peak_nbytes for r in rivals})):
        within = sorted((r for r in rivals if r.peak_nbytes <= limit), key=lambda r: seconds[r.name])
        rows.append(_row(case, limit, within[:_RIVALS], network, chosen))
    return rows


def workloads(chosen: Settings) -> Iterator[Workload]:
    """The chains alone, with as many bytes as checkpoint_sequential takes with sqrt(n) segments; small batches."""
    for case in _cases(chosen, 4):
        network = case.network()
        limit = _rival(network, case, math.isqrt(len(network.blocks)), False).peak_nbytes
        chain = ts.Chain(list(network.blocks), budget=limit, gradients_within=True)
        yield Workload(case.name, stepper(network, case, chain), partial(_planned, chain))


def _planned(chain: ts.Chain) -> str:
    assert chain.plan is not None
    return f"{chain.plan.planner}, {chain.plan.simulation.forwards} forwards"


def rivals_of(network: Network, case: Case, every: int = 1) -> list[Rival]:
    """Every number of segments, or one in ``every`` and the largest, reentrant and not."""
    most = len(network.blocks)
    numbers = sorted({*range(1, most + 1, every), most})
    return [_rival(network, case, s, r) for s in numbers for r in (False, True)]


def _rival(network: Network, case: Case, segments: int, reentrant: bool) -> Rival:
    def run_blocks(x: Tensor) -> Tensor:
        found: Tensor = checkpoint_sequential(  # type: ignore[no-untyped-call]
            list(network.blocks), segments, x, use_reentrant=reentrant
        )
        return found

    step = stepper(network, case, run_blocks)
    step()
    return Rival(segments, reentrant, step, peak_of_step(network, step, case))


def peak_of_step(network: Network, step: Callable[[], None], case: Case) -> int:
    """Bytes beyond weights and batch, gradients among them."""
    network.zero_grad()
    gc.collect()  # what earlier steps left behind, freed while this one runs, would count against its peak
    return peak_nbytes(step, case.device)


def stepper(network: Network, case: Case, run_blocks: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """zero_grad, forward and backward as a function."""
    x, targets = case.batch()

    def step() -> None:
        network.zero_grad()
        network.loss(x, targets, run_blocks).backward()  # type: ignore[no-untyped-call]

    return step


def first_look(rivals: list[Rival], chosen: Settings) -> dict[str, float]:
    """Seconds of each by name: processor time, the quietest measure there is."""
    timings = alternate({r.name: r.step for r in rivals}, 1 if len(rivals) > 40 else 3, chosen.device, warm=0)
    times = timings.wall if chosen.device == "cuda" else timings.cpu
    return {name: min(found) for name, found in times.items()}


def _spread(peaks: list[int]) -> list[int]:
    count = min(_PEAKS, len(peaks))
    return [peaks[round(i * (len(peaks) - 1) / max(1, count - 1))] for i in range(count)]


def _row(case: Case, limit: int, rivals: list[Rival], theirs: Network, chosen: Settings) -> Row:
    row: Row = {"network": case.name, "peak allowed MiB": mebibytes(limit)}
    network = case.network()
    found = _within(network, case, limit)
    if found is None:
        return {**row, "plan": "none has a measured peak that low", "best of PyTorch": rivals[0].name, "met": "no"}
    chain, peak = found
    timings = alternate(
        {"ours": stepper(network, case, chain), **{r.name: r.step for r in rivals}}, chosen.rounds, chosen.device
    )
    best = min((r.name for r in rivals), key=timings.seconds)
    ratio = timings.ratio("ours", best)
    equal = same_bits([p.grad for p in network.parameters()], [p.grad for p in theirs.parameters()])
    return {
        **row, "peak MiB": mebibytes(peak), "plan": _planned(chain),
        "ms": milliseconds(timings.seconds("ours")), "best of PyTorch": best,
        "its peak MiB": mebibytes(next(r.peak_nbytes for r in rivals if r.name == best)),
        "its ms": milliseconds(timings.seconds(best)), **ratio, "claim": "at most 1.00",
        "met": yes(ratio["ratio"] <= 1.0), "same bits": yes(equal),
    }  # fmt: skip


def _within(network: Network, case: Case, limit: int) -> tuple[ts.Chain, int] | None:
    """The chain with the largest budget found whose measured peak is at most ``limit``, by bisection, and its peak."""
    best: tuple[ts.Chain, int] | None = None
    low, high, middle = 0, limit, limit
    for _ in range(10):
        chain = ts.Chain(list(network.blocks), budget=middle, gradients_within=True)
        step = stepper(network, case, chain)
        try:
            step()
        except ts.BudgetError:
            low = middle
        else:
            peak = peak_of_step(network, step, case)
            if peak <= limit:
                best, low = (chain, peak), middle
            else:
                high = middle
        if high - low < limit // 200 or (best is not None and best[1] > 0.99 * limit):
            break
        middle = (low + high) // 2
    return best


if __name__ == "__main__":
    main()
