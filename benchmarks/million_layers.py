"""Claim: networks of up to a million layers, and GPTs of up to 175 billion parameters, are really trained, parameters
on disk, under a hard limit in which plain PyTorch fails; and depth costs nothing superlinear.

Each run is a child of its own, which may take what Python and PyTorch take after a small run of the same kind, plus the
limit. Both sides ask Linux for large pages, as PyTorch does if told to. ``--scale 0.01`` runs all at a hundredth of the
depth, or of a GPT's parameters; ``--only`` names some, of which the rows in the result file are replaced, as they come,
with the commit that each was measured at; ``--saves`` measures making, moving home and saving alone, and puts these
columns into the rows that are there.

Peaks: ``planned`` is what `ts.report` says of tensors, which the budget is for; ``process peak MiB`` is what the whole
process grew by, at its most, which the limit is for: also Python's objects, autograd's nodes, and what malloc keeps.
"""

import argparse
import datetime
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
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import (
    RESULTS,
    Row,
    Settings,
    commit,
    forget_resident_peak,
    mebibytes,
    process_nbytes,
    synchronize,
)
from benchmarks.deep_rows import LINK, keep_as_they_come
from tapestream.cli.loop import Config, config_from_json, config_to_json, model_of, optimizer_class
from tapestream.models import DRANetConfig, GPTConfig, ResNetConfig
from tapestream.simulate import simulate

TITLE = "A million layers on one machine, under a hard memory limit"
MIB = 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One child. ``limit``: bytes above the interpreter, ``budget``: those of them that `tapestream.stream` may plan
    with (0: plain PyTorch). ``size``: pixels of an image's side, or tokens. ``segments``: every group of layers is
    one, so that all runs make the same sweeps. ``limit`` 0: none."""

    name: str
    config: Config
    batch: int
    size: int
    steps: int
    limit: int
    budget: int
    segments: bool = True
    optimizer: str = "sgd"

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

    @property
    def layers(self) -> int:
        """As papers count them: those of a ResNet with weights, blocks of a GPT."""
        return self.config.layers if isinstance(self.config, GPTConfig) else self.backbone.depth

    def shallow(self) -> "Job":
        """The same with as few blocks as there can be: it starts the threads and imports what the real one does."""
        budget = self.budget and max(self.budget, 512 * MIB)
        if isinstance(self.config, GPTConfig):
            tiny = replace(self.config, layers=2, width=64, heads=1, vocabulary=256)
            return replace(self, config=tiny, steps=1, budget=budget)
        small = replace(self.backbone, stages=tuple(min(3, n) for n in self.backbone.stages), group_nbytes=1)
        return replace(self, config=self._with(small), steps=1, budget=budget)

    def plain(self) -> "Job":
        """The same in plain PyTorch, every layer a module of its own."""
        config = self.config
        if not isinstance(config, GPTConfig):
            config = self._with(replace(self.backbone, group_nbytes=0))
        return replace(self, config=config, budget=0, steps=1)

    def _with(self, backbone: ResNetConfig) -> Config:
        return replace(self.config, backbone=backbone) if isinstance(self.config, DRANetConfig) else backbone


def jobs(scale: float) -> list[Job]:
    """Every run of the table, and the shallower ones that it is compared with."""

    def deep(name: str, layers: int, stages: int, size: int, steps: int) -> Job:
        # Thin layers are many to a group, and the budget less than all parameters take: peaks can then be compared.
        group, budget = (8 * MIB, 768 * MIB) if stages == 1 else (MIB, 1280 * MIB)
        depth = 2 + 2 * max(stages, round(layers * scale) // 2)
        return Job(
            name, ResNetConfig.cifar(depth, stages=stages, group_nbytes=group), 1, size, steps, 2048 * MIB, budget
        )  # fmt: skip

    def gpt(name: str, size: str, tokens: int, steps: int, limit: int, budget: int, **changes: Any) -> Job:
        config, optimizer = GPTConfig.named(size), changes.pop("optimizer", "sgd")
        heads = max(1, round(config.heads * scale**0.5))  # a hundredth of the parameters at a tenth of the width
        width, vocabulary = config.width // config.heads * heads, round(config.vocabulary * scale**0.5)
        config = replace(config, width=width, heads=heads, vocabulary=vocabulary, **changes)
        return Job(name, config, 1, tokens, steps, limit * MIB, budget * MIB, segments=False, optimizer=optimizer)

    blocks = max(11, round(250_000 * scale) // 3)
    backbone = ResNetConfig.deep(2 + 3 * blocks, width=8)
    large = ResNetConfig.named("resnet2500", classes=1000)
    if scale < 1:
        large = replace(large, stages=(2, 2, max(2, round(788 * scale)), 2))
    half = torch.bfloat16
    return [
        deep("ResNet, 32x32", 2_500, 3, 32, 2),
        deep("ResNet, 32x32", 25_000, 3, 32, 2),
        deep("ResNet, 32x32", 250_000, 3, 32, 2),
        deep("ResNet, width 16, 8x8", 100_000, 1, 8, 1),
        deep("ResNet, width 16, 8x8", 1_000_000, 1, 8, 1),
        Job("DRANet, 32x32 crops", DRANetConfig.on(backbone, 4), 2, 32, 1, 2048 * MIB, 1280 * MIB),
        Job("ResNet-2500, 224x224", large, 16, 224, 1, 6144 * MIB, 5376 * MIB, segments=False),
        gpt("GPT-2 XL, AdamW", "gpt2-1.5b", 256, 5, 2048, 1280, optimizer="adamw"),
        gpt("GPT-3 6.7B, bfloat16", "gpt3-6.7b", 256, 1, 4096, 3072, dtype=half),
        gpt(
            "GPT-3 175B, bfloat16, shared storage: one stored layer for all, tied head",
            "gpt3-175b",
            64,
            1,
            12288,
            11264,
            dtype=half,
            shared=True,
            halves=True,  # a stage is half a layer
        ),
    ]


def main() -> None:
    """Run the table, or be a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scale", type=float, default=1.0, help="of the depths; results are written for 1 only")
    parser.add_argument("--output", default=str(RESULTS), help="folder of the result file")
    parser.add_argument("--only", default="", help="part of the name of the runs wanted")
    parser.add_argument("--saves", action="store_true", help="no steps: what it takes to make, move home and save")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the disk is that is streamed from")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        torch.set_num_threads(given.threads)
        child(Job.from_json(given.child), given.folder)
        return
    chosen = Settings("cpu", given.scale != 1, 1, given.threads, given.scale == 1, given.folder)
    wanted = [job for job in jobs(given.scale) if given.only in job.name]
    if given.saves:
        wanted = [replace(job, steps=0) for job in wanted if job.segments]
    update(wanted, chosen, Path(given.output))


def update(wanted: list[Job], chosen: Settings, output: Path) -> None:
    """Run ``wanted`` (see `keep_as_they_come`)."""
    order = [(job.name, job.layers) for job in jobs(1)]
    keep_as_they_come(_rows(wanted, chosen), order, "million_layers", TITLE, chosen, output, update="in backward")


def _rows(wanted: list[Job], chosen: Settings) -> Iterator[Row]:
    """A row per job."""
    for job in wanted:
        if not job.steps:
            saved = run(job, chosen)
            yield {"network": job.name, "layers": job.layers, **saved, "saved on": datetime.date.today().isoformat()}
            continue
        row = {**_described(job, chosen), **run(job, chosen)}
        row["plain PyTorch"] = run(job.plain(), chosen).get("failed", "fits")
        if job.name.startswith("ResNet-2500"):
            row["deepest that plain PyTorch fits"] = deepest = deepest_plain(job, chosen)
            row["times as deep"] = round(job.layers / max(1, deepest), 1)
        if job.optimizer == "adamw" and "failed" not in row:
            row["s resident"] = resident = resident_seconds(job, chosen)
            row[LINK] = round(row["step s"] / max(resident, row["link s"]), 3)
        yield row


def _described(job: Job, chosen: Settings) -> Row:
    return {
        "network": job.name, "layers": job.layers, "batch": job.batch, "size": job.size, "optimizer": job.optimizer,
        "limit MiB": mebibytes(job.limit), "budget MiB": mebibytes(job.budget),
        "date": datetime.date.today().isoformat(), "commit": commit(), "threads": chosen.threads,
    }  # fmt: skip


def resident_seconds(job: Job, chosen: Settings) -> float:
    """Seconds of a step of plain PyTorch with everything in memory, from nets of one and of three of its layers."""
    assert isinstance(job.config, GPTConfig)
    seconds = [
        run(replace(job.plain(), config=replace(job.config, layers=count), steps=5, limit=0), chosen)["step s"]
        for count in (1, 3)
    ]
    return round(seconds[0] + (seconds[1] - seconds[0]) / 2 * (job.layers - 1), 2)


def deepest_plain(job: Job, chosen: Settings) -> int:
    """Layers of the deepest network with this one's other stages that plain PyTorch trains within the limit; found by
    halving, each try a child. 0 where none does."""
    stages = job.backbone.stages

    def with_third(count: int) -> Job:
        config = replace(job.backbone, stages=(*stages[:2], count, *stages[3:]))
        return replace(job, config=config).plain()

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
    environment = {**os.environ, "OMP_NUM_THREADS": str(chosen.threads), "THP_MEM_ALLOC_ENABLE": "1"}
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
        taken = process_nbytes()["VmData"]
        if job.limit:
            resource.setrlimit(resource.RLIMIT_DATA, (taken + job.limit,) * 2)
        forget_resident_peak()
        before = process_nbytes()["RssAnon"]
        try:
            row = work(job, home)
        except (RuntimeError, MemoryError) as error:
            if job.budget:
                raise
            row = {"failed": (str(error).splitlines() or ["out of memory"])[0][:120]}
    print(json.dumps({**row, "interpreter MiB": mebibytes(before)}))


def _stream(job: Job, home: str) -> Row:
    depth, row = job.layers, Row()
    start = process_nbytes()
    with torch.device("meta"):
        hollow, row["make us/layer"] = _timed(depth, lambda: model_of(job.config))
    knobs: dict[str, Any] = {}
    if not isinstance(job.config, GPTConfig):
        knobs["blocks"] = list(hollow.blocks)
    if job.segments:
        knobs |= {"planner": "periodic", "segments": len(hollow.blocks)}
    model, row["home us/layer"] = _timed(
        depth, lambda: ts.stream(hollow, device="cpu", budget=job.budget, folder=home, **knobs)
    )
    optimizer = ts.optimizer(model, optimizer_class(job.optimizer), update="backward", lr=1e-3)
    row["Python bytes/layer"] = round(max(0, process_nbytes()["RssAnon"] - start["RssAnon"]) / depth)
    row["groups"] = len(hollow.blocks)
    if job.steps:
        row |= _trained(job, model, optimizer, start)
    if job.segments:  # under the same limit: saving needs no more memory than training
        saved, row["save us/layer"] = _timed(
            depth, lambda: ts.save(Path(home) / "saves", model=model, optimizer=optimizer)
        )
        row["saved MiB"] = mebibytes(sum(file.stat().st_size for file in saved.rglob("*.*")))
    return row


def _trained(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, start: dict[str, int]) -> Row:
    """What planning and the steps took; ``start``: the process's bytes before the model was made."""
    depth, row = job.layers, Row()
    _, row["plan us/layer"] = _timed(depth, lambda: ts.plan(model, batch_of(job)))
    losses, seconds = train(job, model, optimizer)
    report = ts.report(model)
    row |= {
        "parameters": sum(p.numel() for p in model.parameters()),
        "sweeps": round(report.plan.simulation.forwards / len(report.plan.profile), 2),
        "step s": round(median(seconds), 2), "step us/layer": round(median(seconds) / depth * 1e6, 2),
        "steps s": " ".join(f"{one:.2f}" for one in seconds),
        "link s": round(sum(map(_link_seconds, report.plans)), 2),
        "waited s": round(report.wait_seconds, 2), "moved MiB": mebibytes(sum(report.bytes_moved.values())),
        "planned peak MiB": mebibytes(max(plan.peak_nbytes for plan in report.plans)),
        "process peak MiB": mebibytes(process_nbytes()["VmHWM"] - start["VmRSS"]),
        "losses": " ".join(f"{loss:.6g}" for loss in losses),
    }  # fmt: skip
    return row


def _link_seconds(plan: ts.Plan) -> float:
    """What the step would take if computing took no time: the disk's own time at the measured mix of directions."""
    idle = [replace(s, forward_seconds=0.0, backward_seconds=0.0, record_seconds=0.0) for s in plan.profile.stages]
    blocks = [replace(block, update_seconds=0.0) for block in plan.profile.blocks]
    bare = replace(plan.profile, stages=tuple(idle), blocks=tuple(blocks), turn_seconds=0.0)
    return simulate(plan.schedule, bare, plan.machine).makespan_seconds


def _plain(job: Job, home: str) -> Row:
    model = model_of(job.config)
    optimizer = optimizer_class(job.optimizer)(model.parameters(), lr=1e-3)
    losses, seconds = train(job, model, optimizer)
    return {"losses": " ".join(f"{loss:.6g}" for loss in losses), "step s": round(median(seconds), 4)}


def train(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu"
) -> tuple[list[float], list[float]]:
    """The loss and the seconds of each of the job's steps."""
    losses, seconds = [], []
    for step in range(job.steps):
        inputs, targets = (tensor.to(device) for tensor in batch_of(job))
        synchronize(device)
        begin = time.perf_counter()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.6g}, {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return losses, seconds


def batch_of(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """The same at every step."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(job.config, GPTConfig):
        tokens = torch.randint(job.config.vocabulary, (job.batch, job.size + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (job.batch, job.size, job.size)
    images = torch.randn(job.batch, job.backbone.channels, job.size, job.size, generator=generator)
    segments = isinstance(job.config, DRANetConfig)
    return images, torch.randint(job.config.classes, shape if segments else shape[:1], generator=generator)


def _timed(depth: int, work: Callable[[], T]) -> tuple[T, float]:
    begin = time.perf_counter()
    found = work()
    return found, round((time.perf_counter() - begin) / depth * 1e6, 2)


if __name__ == "__main__":
    main()
