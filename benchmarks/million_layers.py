"""Claim: networks of up to a million layers are really trained, parameters on disk, under a hard limit in which plain
PyTorch fails; and depth costs nothing superlinear.

Each run is a child of its own. It may take what Python and PyTorch take after a small run of the same kind, plus the
limit: Python objects, plans and threads lie within it. ``--scale 0.01`` runs all of them at a hundredth of the depth;
``--only`` names some.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import Row, Settings, mebibytes, save
from tapestream.cli.children import _ENVIRONMENT
from tapestream.cli.loop import Config, config_from_json, config_to_json, model_of
from tapestream.models import DRANetConfig, ResNetConfig

TITLE = "A million layers on one machine, under a hard memory limit"
MIB = 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One child. ``limit``: bytes above the interpreter, ``budget``: those of them that `tapestream.stream` may plan
    with (0: plain PyTorch). ``segments``: every group of layers is one, so that all runs make the same sweeps."""

    name: str
    config: Config
    batch: int
    size: int
    steps: int
    limit: int
    budget: int
    segments: bool = True

    def to_json(self) -> str:
        """For the child's command line."""
        return json.dumps({**asdict(self), "config": config_to_json(self.config)})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """The inverse of `to_json`."""
        found = json.loads(text)
        return cls(**{**found, "config": config_from_json(found["config"])})

    @property
    def backbone(self) -> ResNetConfig:
        """The ResNet in it."""
        config = self.config.backbone if isinstance(self.config, DRANetConfig) else self.config
        assert isinstance(config, ResNetConfig)
        return config

    def shallow(self) -> "Job":
        """The same with as few blocks as there can be: it starts the threads and imports what the real one does."""
        small = replace(self.backbone, stages=tuple(min(3, n) for n in self.backbone.stages), group_nbytes=1)
        shape = replace(self.config, backbone=small) if isinstance(self.config, DRANetConfig) else small
        return replace(self, config=shape, steps=1, budget=self.budget and max(self.budget, 512 * MIB))


def jobs(scale: float) -> list[Job]:
    """Every run of the table, and the shallower ones that it is compared with."""

    def deep(name: str, layers: int, stages: int, size: int, steps: int) -> Job:
        # Thin layers are many to a group, and the budget less than all parameters take: peaks can then be compared.
        group, budget = (8 * MIB, 768 * MIB) if stages == 1 else (MIB, 1280 * MIB)
        depth = 2 + 2 * max(stages, round(layers * scale) // 2)
        return Job(
            name, ResNetConfig.cifar(depth, stages=stages, group_nbytes=group), 1, size, steps, 2048 * MIB, budget
        )  # fmt: skip

    blocks = max(11, round(250_000 * scale) // 3)
    backbone = ResNetConfig.deep(2 + 3 * blocks, width=8)
    large = ResNetConfig.named("resnet2500", classes=1000)
    if scale < 1:
        large = replace(large, stages=(2, 2, max(2, round(788 * scale)), 2))
    return [
        deep("ResNet, 32x32", 2_500, 3, 32, 2),
        deep("ResNet, 32x32", 250_000, 3, 32, 2),
        deep("ResNet, width 16, 8x8", 100_000, 1, 8, 1),
        deep("ResNet, width 16, 8x8", 1_000_000, 1, 8, 1),
        Job("DRANet, 32x32 crops", DRANetConfig.on(backbone, 4), 2, 32, 1, 2048 * MIB, 1280 * MIB),
        Job("ResNet-2500, 224x224", large, 16, 224, 1, 6144 * MIB, 5376 * MIB, segments=False),
    ]


def main() -> None:
    """Run the table, or be a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0, help="of the depths; results are written for 1 only")
    parser.add_argument("--only", default="", help="part of the name of the runs wanted")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the disk is that is streamed from")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        torch.set_num_threads(given.threads)
        child(Job.from_json(given.child), given.folder)
        return
    whole = given.scale == 1 and not given.only
    chosen = Settings("cpu", not whole, 1, given.threads, whole, given.folder)
    wanted = [job for job in jobs(given.scale) if given.only in job.name]
    save("million_layers", TITLE, chosen, _rows(wanted, chosen), scale=given.scale, optimizer="SGD, update='backward'")


def _rows(wanted: list[Job], chosen: Settings) -> Iterator[Row]:
    before: dict[str, Row] = {}
    for job in wanted:
        row = {**_described(job), **run(job, chosen)}
        row["plain PyTorch"] = run(replace(job, budget=0, steps=1), chosen).get("failed", "fits")
        shallower = before.get(job.name)
        if shallower is not None and "failed" not in row and "failed" not in shallower:
            row["seconds per layer, of the shallower's"] = round(row["step us/layer"] / shallower["step us/layer"], 3)
            row["peak, of the shallower's"] = round(row["peak MiB"] / shallower["peak MiB"], 3)
        before[job.name] = row
        yield row
        if job.name.startswith("ResNet-2500"):
            deepest = deepest_plain(job, chosen)
            yield {
                **_described(job), "network": "the deepest of its kind that plain PyTorch fits", "layers": deepest,
                "times as deep": round(job.backbone.depth / max(1, deepest), 1),
            }  # fmt: skip


def _described(job: Job) -> Row:
    return {
        "network": job.name, "layers": job.backbone.depth, "batch": job.batch, "limit MiB": mebibytes(job.limit),
        "budget MiB": mebibytes(job.budget),
    }  # fmt: skip


def deepest_plain(job: Job, chosen: Settings) -> int:
    """Layers of the deepest network with this one's other stages that plain PyTorch trains within the limit; found by
    halving, each try a child. 0 where none does."""
    stages = job.backbone.stages

    def with_third(count: int) -> Job:
        config = replace(job.backbone, stages=(*stages[:2], count, *stages[3:]))
        return replace(job, config=config, budget=0, steps=1)

    low, high = 0, stages[2] + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if "failed" in run(with_third(middle), chosen) else (middle, high)
    return with_third(low).backbone.depth if low else 0


def run(job: Job, chosen: Settings) -> Row:
    """What the child says, or ``failed`` and why."""
    command = [
        sys.executable, "-m", "benchmarks.million_layers", "--child", job.to_json(),
        "--threads", str(chosen.threads), "--folder", chosen.folder,
    ]  # fmt: skip
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(chosen.threads)}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        found: Row = json.loads(lines[-1])
        return found
    last = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    return {"failed": last[-1][:120]}


def child(job: Job, folder: str) -> None:
    """One run; prints its row."""
    work = _stream if job.budget else _plain
    with tempfile.TemporaryDirectory(dir=folder) as home:
        work(job.shallow(), home)
        taken = _status()["VmData"]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + job.limit,) * 2)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        before = _status()["RssAnon"]
        try:
            row = work(job, home)
        except (RuntimeError, MemoryError) as error:
            if job.budget:
                raise
            row = {"failed": (str(error).splitlines() or ["out of memory"])[0][:120]}
    print(json.dumps({**row, "interpreter MiB": mebibytes(before)}))


def _stream(job: Job, home: str) -> Row:
    depth, row = job.backbone.depth, Row()
    start = _status()
    with torch.device("meta"):
        hollow, row["make us/layer"] = _timed(depth, lambda: model_of(job.config))
    blocks = list(hollow.blocks)
    knobs: dict[str, Any] = {"planner": "periodic", "segments": len(blocks)} if job.segments else {}
    model, row["home us/layer"] = _timed(
        depth, lambda: ts.stream(hollow, device="cpu", budget=job.budget, folder=home, blocks=blocks, **knobs)
    )
    optimizer = ts.optimizer(model, torch.optim.SGD, update="backward", lr=1e-3)
    row["Python bytes/layer"] = round(max(0, _status()["RssAnon"] - start["RssAnon"]) / depth)
    images, targets = _batch(job, 0)
    _, row["plan us/layer"] = _timed(depth, lambda: ts.plan(model, (images, targets)))
    losses, seconds = _train(job, model, optimizer)
    report = ts.report(model)
    row |= {
        "parameters": sum(p.numel() for p in model.parameters()), "groups": len(blocks),
        "sweeps": round(report.plan.simulation.forwards / len(report.plan.profile), 2),
        "step s": round(min(seconds), 2), "step us/layer": round(min(seconds) / depth * 1e6, 2),
        "waited s": round(report.wait_seconds, 2), "moved MiB": mebibytes(sum(report.bytes_moved.values())),
        "planned peak MiB": mebibytes(report.plan.peak_nbytes),
        "peak MiB": mebibytes(_status()["VmHWM"] - start["VmRSS"]),
        "losses": " ".join(f"{loss:.6g}" for loss in losses),
    }  # fmt: skip
    return row


def _plain(job: Job, home: str) -> Row:
    shape = replace(job.backbone, group_nbytes=0)
    config = replace(job.config, backbone=shape) if isinstance(job.config, DRANetConfig) else shape
    model = model_of(config)
    losses, _ = _train(job, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return {"losses": " ".join(f"{loss:.6g}" for loss in losses)}


def _train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    losses, seconds = [], []
    for step in range(job.steps):
        images, targets = _batch(job, 0)
        begin = time.perf_counter()
        loss = model(images, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.6g}, {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return losses, seconds


def _batch(job: Job, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape = (job.batch, job.size, job.size)
    images = torch.randn(job.batch, job.backbone.channels, job.size, job.size, generator=generator)
    segments = isinstance(job.config, DRANetConfig)
    return images, torch.randint(job.config.classes, shape if segments else shape[:1], generator=generator)


def _timed(depth: int, work: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    found = work()
    return found, round((time.perf_counter() - begin) / depth * 1e6, 2)


def _status() -> dict[str, int]:
    """Bytes of this process, as the system counts them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


if __name__ == "__main__":
    main()
