"""Are copies hidden, and is the simulator's timeline the real one? A streamed model of 3B parameters, profiled."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import tapestream as ts
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.intervals import Interval, hidden, length, of_events
from benchmarks.gpu.contact.models import LLAMA_3B, TINY, batch, llama
from benchmarks.gpu.contact.results import Result
from benchmarks.gpu.contact.training import moved_of, step_of, timed

BUDGET = 6 * 10**9
"""The parameters alone take 7.2 GB."""
_LESS_HIDDEN = 0.1  # than the timeline says


def streamed(chosen: Chosen) -> Iterator[Result]:
    """Steps with SGD in the backward; then one under the profiler, whose trace stays in the folder of results."""
    shape = chosen.size(LLAMA_3B, TINY)
    data = batch(shape.vocabulary, chosen.size(4, 2), chosen.size(2048, 32), chosen.device)
    machine = ts.measure_machine(chosen.device, quick=True)
    model = ts.stream(
        llama(shape), device=chosen.device, budget=chosen.size(BUDGET, 650_000), home="host", machine=machine,
        loss_chunks="auto", head="head",
    )  # fmt: skip
    optimizer = ts.optimizer(model, torch.optim.SGD, lr=1e-3, update="backward", master=None)
    say(f"{shape.parameters / 1e9:.2f} billion parameters at home")
    step = step_of(model, optimizer, data)
    timed(step, 2, chosen)
    ts.report(model)  # counts from here
    seconds, _ = timed(step, 3, chosen)
    report = ts.report(model)
    measured, planned = median(seconds), sum(plan.seconds for plan in report.plans)
    numbers = {
        "step_seconds": measured, "planned_step_seconds": planned, "planned_over_measured": planned / measured,
        "waited_seconds": report.wait_seconds / len(seconds), **moved_of(report, len(seconds)),
        "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards", "parameters": shape.parameters,
    }  # fmt: skip
    claim = "the planned makespan is between 0.8 and 1.25 of the measured"
    yield Result("timeline", claim, chosen.of_speed(0.8 <= planned / measured <= 1.25), numbers)
    lanes = _planned_lanes(report)
    found = None if chosen.dry else _profiled(step, chosen.folder / "streamed_3b.json.gz")
    yield _compared(lanes, found)


def _planned_lanes(report: Any) -> dict[str, list[Interval]]:
    """The first chain's timeline: what computes, and what is copied up and down."""
    names = {"compute": "kernel", "HOST to DEVICE": "up", "DEVICE to HOST": "down"}
    found: dict[str, list[Interval]] = {name: [] for name in names.values()}
    for span in report.plan.simulation.timeline.spans:
        if span.lane in names:
            found[names[span.lane]].append((span.start_seconds, span.start_seconds + span.duration_seconds))
    return found


def _profiled(step: Callable[[], object], file: Path) -> dict[str, list[Interval]]:
    """One step's kernels and copies as the card ran them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(file))
    with gzip.open(file, "rt") as text:
        return of_events(json.load(text)["traceEvents"])


def _compared(planned: dict[str, list[Interval]], found: dict[str, list[Interval]] | None) -> Result:
    """Shares of the time of copies in which a kernel ran too, planned and measured. Without a profiler: null."""
    numbers: dict[str, Any] = {}
    for prefix, lanes in (("planned", planned), ("measured", found)):
        for way in ("up", "down"):
            numbers[f"{prefix}_hidden_{way}"] = None if lanes is None else hidden(lanes[way], lanes["kernel"])
            numbers[f"{prefix}_{way}_seconds"] = None if lanes is None else length(lanes[way])
        numbers[f"{prefix}_kernel_seconds"] = None if lanes is None else length(lanes["kernel"])
    claim = f"copies are hidden as the timeline says, or at most {_LESS_HIDDEN} less"
    return Result("copies hidden", claim, None if found is None else _as_hidden(numbers), numbers)


def _as_hidden(numbers: dict[str, Any]) -> bool:
    pairs = [(numbers[f"planned_hidden_{way}"], numbers[f"measured_hidden_{way}"]) for way in ("up", "down")]
    return all(want is None or (got is not None and got >= want - _LESS_HIDDEN) for want, got in pairs)
