"""The options of ``tapestream plan``."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli import checks
from tapestream.cli.ends import importing, reported
from tapestream.cli.options import (
    Blocks,
    Budget,
    Dtype,
    Folder,
    Heads,
    Home,
    HostBudget,
    Json,
    Layers,
    PlannedOptimizer,
    Samples,
    Target,
    Tokens,
    Update,
    Vocabulary,
    Width,
)
from tapestream.system.collector import never_collecting

PlannedDevice = Annotated[
    str | None,
    typer.Option("--device", help="cuda, or cpu (no GPU: RAM is the device); by default that of --machine, or cuda."),
]
Gpu = Annotated[str | None, typer.Option(help="Memory of the GPU.")]
Ram = Annotated[str | None, typer.Option(help="RAM of the machine; by default this machine's.")]
Disk = Annotated[str | None, typer.Option(help="Free disk space; by default that of --folder on this machine.")]
Lora = Annotated[int | None, typer.Option(min=1, help="Train LoRA adapters of this rank, not the weights.")]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--tables", help="Name of an embedding that stays off the device, whose rows are looked up; may be repeated."
    ),
]
LossChunks = Annotated[
    str | None, typer.Option(help="Chunks in which the loss is computed: auto, or how many; by default all at once.")
]
LinkRate = Annotated[
    str | None, typer.Option("--link", help="Speed of the link between RAM and GPU, each way; by default 25GB/s.")
]
DiskRead = Annotated[str | None, typer.Option(help="Speed of reading the disk; by default 3GB/s.")]
DiskWrite = Annotated[str | None, typer.Option(help="Speed of writing the disk; by default 2GB/s.")]
Flops = Annotated[
    str | None, typer.Option(help="FLOP/s that the device reaches; by default 100TFLOP/s, on cpu 100GFLOP/s.")
]
MemoryRate = Annotated[
    str | None, typer.Option(help="Speed of the device's own memory; by default 1TB/s, on cpu 5GB/s.")
]


Ranks = Annotated[int | None, typer.Option(min=1, help="GPUs that train together, each with --batch samples.")]
Machines = Annotated[int | None, typer.Option(min=1, help="Machines that the GPUs are in; by default 1.")]
Replicate = Annotated[
    bool, typer.Option("--replicate", help="Each machine has the whole model; by default all share one.")
]
Peers = Annotated[
    str | None, typer.Option(help="Speed between the GPUs of a machine, of each and each way; by default 25GB/s.")
]
Network = Annotated[str | None, typer.Option(help="Speed between machines, of each; by default 12.5GB/s.")]
HostUpdate = Annotated[
    str | None,
    typer.Option("--host-update", help="Parameters a second that an optimizer updates in RAM; by default 2.5e9."),
]
Where = Annotated[
    str | None,
    typer.Option(
        help="device: blocks are updated on the GPU. host: in RAM, where their state stays. mixed: each where the step "
        "is fastest. auto: device, unless both were measured to give the same bits. With it, the seconds of other ways "
        "are shown."
    ),
]
Save = Annotated[Path | None, typer.Option(help="Write the plan to this file, as JSON.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the plan into this file, with --compare the trade-off (.png, .pdf, .svg).")
]
MachineFile = Annotated[
    Path | None, typer.Option(help="File with speeds, RAM and disk that `tapestream machine --save` wrote.")
]


@reported
@never_collecting
def plan(
    target: Target = "gpt",
    layers: Layers = None,
    width: Width = None,
    heads: Heads = None,
    seq: Tokens = None,
    batch: Samples = None,
    vocabulary: Vocabulary = None,
    dtype: Dtype = "fp32",
    blocks: Blocks = None,
    optimizer: PlannedOptimizer = "adamw",
    update: Update = "step",
    where: Where = None,
    loss_chunks: LossChunks = None,
    lora: Lora = None,
    tables: Tables = None,
    device: PlannedDevice = None,
    budget: Budget = None,
    gpu: Gpu = None,
    host_budget: HostBudget = None,
    ram: Ram = None,
    disk: Disk = None,
    home: Home = "auto",
    folder: Folder = None,
    link: LinkRate = None,
    disk_read: DiskRead = None,
    disk_write: DiskWrite = None,
    flops: Flops = None,
    memory_rate: MemoryRate = None,
    host_update: HostUpdate = None,
    machine: MachineFile = None,
    ranks: Ranks = None,
    machines: Machines = None,
    replicate: Replicate = False,
    peers: Peers = None,
    network: Network = None,
    save: Save = None,
    plot: Plot = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Show what would make the step faster.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show the plan of every planner.")] = False,
    json_: Json = False,
) -> None:
    """Say whether a training step fits, what it takes in each tier and how long. Exit status 2: it does not fit."""
    from tapestream.cli.hardware import HardwareOptions
    from tapestream.cli.ranks import RanksOptions
    from tapestream.cli.targets import TargetOptions, check_target

    checks.check_planned(optimizer, update, where)
    asked = HardwareOptions(
        device, budget, gpu, host_budget, ram, disk, home, folder, link, disk_read, disk_write, flops, memory_rate,
        host_update, machine, RanksOptions(ranks, machines, replicate, peers, network),
    ).found()  # fmt: skip
    checks.check_told(save, plot, suggest=suggest, compare=compare)
    wish = TargetOptions(layers, width, heads, vocabulary, batch, seq, dtype, tuple(blocks or ()))
    check_target(target, wish)
    with importing():
        from tapestream.cli.plan import PlanOptions, planned
    chunks, rows = checks.chunks(loss_chunks), tuple(tables or ())
    planned(target, wish, asked, PlanOptions(
        optimizer, update, where, home, chunks, lora, rows, suggest, save, plot, compare, json_))  # fmt: skip
