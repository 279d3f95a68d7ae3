"""The deep networks of benchmarks.million_layers in 12 GB of GPU memory, blocks at home in pinned host memory.

Each run is a child whose allocator takes 12 GB and no more; plain PyTorch is tried under the same cap. FLOPs are those
of the products and convolutions of one forward and one backward, causal attention counted once, recomputes not at all.
"share" is the longer of two bounds over the step: those FLOPs at the measured speed of a block's widest product, or of
the fastest of a ResNet's convolutions, and the bytes moved at the measured speed of the link. ``--quick`` runs tiny
ones on the CPU, blocks on disk; ``--only`` names some, of which the rows in the result file are replaced.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, commit, mebibytes
from benchmarks.deep_rows import keep_as_they_come
from benchmarks.from_disk import link_seconds
from benchmarks.gpu.speeds import convolution_flops_per_second, product_flops_per_second
from benchmarks.million_layers import Job, batch_of, train
from tapestream.cli.loop import model_of, optimizer_class
from tapestream.models import GPTConfig, ResNetConfig

TITLE = "A million layers on one GPU of which 12 GB may be used"
CAP = 12 * 10**9
BUDGET = round(0.95 * CAP)  # the allocator loses some of the cap to fragments


def jobs(quick: bool) -> list[Job]:
    """Every run of the table, or tiny ones of the same kinds."""

    def gpt(name: str, size: str, tokens: int, **changes: Any) -> Job:
        config = GPTConfig(4, 64, 4, vocabulary=256) if quick else GPTConfig.named(size)
        tokens = 32 if quick else tokens
        config = replace(config, context=max(tokens, config.context), dtype=torch.bfloat16, **changes)
        return Job(name, config, 1, tokens, 3, CAP, 1_300_000 if quick else BUDGET, segments=False)

    depth, group, images = (26, 2**14, 2) if quick else (250_002, 2**22, 32)
    resnet, budget = ResNetConfig.cifar(depth, group_nbytes=group), 2**22 if quick else BUDGET
    # One stored layer, of which a stage is half. A tied embedding's gradient waits on the device for its other part.
    kept = "shared storage: one stored layer for all, untied head"
    shared = {"shared": True, "halves": True, "tied": False}
    return [
        Job("ResNet, 32x32", resnet, images, 32, 2, CAP, budget, segments=False),
        gpt("GPT-3 13B, bfloat16", "gpt3-13b", 2048),
        gpt(f"GPT-3 175B, bfloat16, {kept}, 2,048 tokens", "gpt3-175b", 2048, **shared),
        gpt(f"GPT-3 175B, bfloat16, {kept}, 8,192 tokens", "gpt3-175b", 8192, **shared),
    ]


def main() -> None:
    """Run the table, or be a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="tiny sizes on the CPU, nothing is written")
    parser.add_argument("--only", default="", help="part of the name of the runs wanted")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the blocks of --quick live")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file (%(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = Settings("cpu" if given.quick else "cuda", given.quick, 1, given.threads, not given.quick, given.folder)
    if given.child:
        torch.set_num_threads(given.threads)
        print(json.dumps(child(Job.from_json(given.child), chosen)))
        return
    wanted = [job for job in jobs(given.quick) if given.only in job.name]
    order = [(job.name, job.layers) for job in jobs(given.quick)]
    found = rows(wanted, chosen)
    keep_as_they_come(found, order, "gpu_million_layers", TITLE, chosen, given.results, cap=CAP, budget=BUDGET)


def rows(wanted: list[Job], chosen: Settings) -> Iterator[Row]:
    """One for each job, with what became of plain PyTorch."""
    for job in wanted:
        row = {"network": job.name, "layers": job.layers, "batch": job.batch, "size": job.size}
        row |= {"commit": commit(), **run(job, chosen)}
        row["plain PyTorch"] = run(job.plain(), chosen).get("failed", "fits")
        yield row


def run(job: Job, chosen: Settings) -> Row:
    """What the child says, or ``failed`` and why."""
    command = [sys.executable, "-m", "benchmarks.gpu.million_layers", "--child", job.to_json()]
    command += ["--threads", str(chosen.threads), "--folder", chosen.folder, *(["--quick"] if chosen.quick else [])]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found: Row = json.loads(lines[-1])
        return found
    last = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    return {"failed": last[-1][:300]}


def child(job: Job, chosen: Settings) -> Row:
    """One run; ``failed`` where plain PyTorch does not fit."""
    if chosen.device == "cuda":
        everything = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(CAP / everything)
    if job.budget:
        return streamed(job, chosen)
    try:
        return plain(job, chosen.device)
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0][:120]}


def plain(job: Job, device: str) -> Row:
    """Steps of plain PyTorch."""
    with torch.device(device):
        model = model_of(job.config)
    losses, _ = train(job, model, optimizer_class(job.optimizer)(model.parameters(), lr=1e-3), device)
    return {"losses": " ".join(f"{loss:.6g}" for loss in losses)}


def streamed(job: Job, chosen: Settings) -> Row:
    """Steps within the budget beside the bounds, all but the first counted."""
    on_gpu, device = chosen.device == "cuda", chosen.device
    with torch.device("meta"):
        model = model_of(job.config)
    knobs: dict[str, Any] = {"loss_chunks": "auto", "head": "head"}
    if isinstance(job.config, ResNetConfig):
        knobs = {"blocks": list(model.blocks), "planner": "periodic"}
    speed = flops_per_second(job, device)  # with all of the cap to itself: beside the model there would be no room
    if on_gpu:
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        machine = ts.measure_machine(device, folder, quick=not on_gpu)
        model = ts.stream(
            model, device=device, budget=job.budget, home="host" if on_gpu else "disk",
            folder=None if on_gpu else folder, machine=machine, **knobs,
        )  # fmt: skip
        optimizer = ts.optimizer(model, optimizer_class(job.optimizer), update="backward", master=None, lr=1e-3)
        first, _ = train(replace(job, steps=1), model, optimizer, device)
        ts.report(model)  # counts from here
        losses, seconds = train(replace(job, steps=job.steps - 1), model, optimizer, device)
        report, step = ts.report(model), median(seconds)
        parameters = sum(p.numel() for p in model.parameters())
        ts.unstream(model) if not on_gpu else None  # brings all home memory together: the process ends anyway
    moved = {lane: nbytes // len(seconds) for lane, nbytes in report.bytes_moved.items()}
    flops, link = flops_of(job), link_seconds(moved, machine)
    row = {
        "parameters": parameters, "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards",
        "step s": round(step, 3), "TFLOP/s": round(flops / step / 1e12, 3),
        "measured TFLOP/s": round(speed / 1e12, 3), "compute bound s": round(flops / speed, 3),
        "link bound s": round(link, 3), "share": round(max(flops / speed, link) / step, 4),
        "waited s": round(report.wait_seconds / len(seconds), 3), "moved MiB": mebibytes(sum(moved.values())),
        "planned MiB": mebibytes(max(plan.peak_nbytes for plan in report.plans)),
        "losses": " ".join(f"{loss:.6g}" for loss in first + losses),
    }  # fmt: skip
    if on_gpu:
        row["allocated MiB"] = mebibytes(torch.cuda.max_memory_allocated())
        row["reserved MiB"] = mebibytes(torch.cuda.max_memory_reserved())
    return row


def flops_of(job: Job) -> float:
    """Of the products or convolutions of a step's forward and backward."""
    config = job.config
    if isinstance(config, GPTConfig):
        weights = config.layers * 12 * config.width**2 + config.width * config.vocabulary
        attention = config.layers * 2 * job.size**2 * config.width  # two products, half of each by causality
        return 3.0 * job.batch * (2 * weights * job.size + attention)
    assert isinstance(config, ResNetConfig)
    ones = (1,) * len(config.stages)
    least = _counted(job, ones)
    more = [_counted(job, (*ones[:n], 2, *ones[n + 1 :])) - least for n in range(len(ones))]
    return least + sum((blocks - 1) * each for blocks, each in zip(config.stages, more, strict=True))


def _counted(job: Job, stages: tuple[int, ...]) -> int:
    """Those of a network with so few blocks, counted one by one; all blocks of a stage but its first are alike."""
    assert isinstance(job.config, ResNetConfig)
    with torch.device("meta"):
        model = model_of(replace(job.config, stages=stages, group_nbytes=0))
    images, targets = (tensor.to("meta") for tensor in batch_of(job))
    with FlopCounterMode(display=False) as counter:
        model(images, targets).backward()
    return int(counter.get_total_flops())


def flops_per_second(job: Job, device: str) -> float:
    """Measured: the most that the network could reach."""
    config = job.config
    if isinstance(config, GPTConfig):
        return product_flops_per_second(job.batch * job.size, config.width, 4 * config.width, config.dtype, device)
    assert isinstance(config, ResNetConfig)
    sizes = [(channels, job.size >> stage) for stage, channels in enumerate(config.features)]
    return max(convolution_flops_per_second(job.batch, *size, device) for size in sizes)


if __name__ == "__main__":
    main()
