"""One side of `benchmarks.gpu.ranks_nccl`: a process for each GPU, all of which train one model.

Everything is bfloat16: parameters, gradients and both moments of AdamW, on every side, so that bits can be compared.
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tapestream as ts
from benchmarks.common import forget_resident_peak, process_nbytes, synchronize
from benchmarks.gpu.contact.chosen import say
from benchmarks.gpu.contact.models import on_device, quick_gpt
from benchmarks.gpu.contact.results import Result, Results
from benchmarks.gpu.contact.training import Memory, moved_of, step_of, workspace_bytes
from tapestream.models import GPTConfig

SETTLED = 3
"""Steps before the weights are compared and others are timed."""
_BETWEEN = 64 * 2**20
"""Numbers that each rank sends where the links between ranks are measured."""
_NEAR = (0.8, 1.25)
"""Of the planned seconds over the measured: as `benchmarks.gpu.contact.overlap` has it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A side, with the sizes of the model. ``since``: how many results there were before this run."""

    side: str
    ranks: int
    dry: bool
    folder: str
    card: str
    since: int
    layers: int
    width: int
    heads: int
    vocabulary: int
    tokens: int
    batch: int
    rounds: int

    @property
    def device(self) -> str:
        """Where a rank computes."""
        return "cpu" if self.dry else "cuda"

    @property
    def config(self) -> GPTConfig:
        """The model's shape."""
        return GPTConfig(self.layers, self.width, self.heads, self.vocabulary, self.tokens, dtype=torch.bfloat16)

    def to_json(self) -> str:
        """For the command line of the process that does it."""
        return json.dumps(asdict(self))

    def found(self, side: str) -> dict[str, Any] | None:
        """What another side's last line of this run said."""
        lines = Results(Path(self.folder), self.card).read()[self.since :]
        return next((line for line in reversed(lines) if line["step"] == side and "weights" in line), None)


@dataclass(slots=True)
class Training:
    """What a side trains: the ``step`` of one rank, a context in which every weight can be read, and bytes that come
    from other ranks in a step, where they are known beforehand."""

    model: nn.Module
    step: Callable[[], Tensor]
    readable: Callable[[], Any] = nullcontext
    gathered: int = 0


Make = Callable[[Job, int, int, str], Training]
"""Of the job, the rank, the budget and an empty folder."""


@dataclass(frozen=True, slots=True)
class Side:
    """A way to train. ``beside``, of ours alone: the side whose memory is the budget, and whose time it is compared
    with. Without ``make`` it is the links between ranks that are measured."""

    title: str
    make: Make | None
    beside: str = ""
    divided: bool = False


def main() -> None:
    """Start the ranks of the job that the command line holds, and wait for them."""
    job = Job(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        # Without GPUs, ranks need not import anew what is here; with them, a fork could not use them.
        method = "fork" if job.dry else "spawn"
        torch.multiprocessing.start_processes(_rank, (job, folder), nprocs=job.ranks, start_method=method)


def _rank(rank: int, job: Job, folder: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.ranks)}  # as torchrun: ours shares RAM by it
    torch.set_num_threads(1 if job.dry else max(1, (os.cpu_count() or 1) // job.ranks))
    if not job.dry:
        torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would cost time on all sides
    backend = "gloo" if job.dry else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=job.ranks)
    side = SIDES[job.side]
    found = _links(job) if side.make is None else _trained(side, side.make, job, rank, folder)
    for result in found:
        if rank == 0:
            Results(Path(job.folder), job.card).write(job.side, result)
            say(result)
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


def _links(job: Job) -> Iterator[Result]:
    """What a rank receives a second while all gather, and while all add up and keep a part each."""
    part = torch.ones(_BETWEEN // 64 if job.dry else _BETWEEN, dtype=torch.bfloat16, device=job.device)
    whole = torch.empty(job.ranks * part.numel(), dtype=part.dtype, device=job.device)
    received = (job.ranks - 1) * part.nbytes
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # PyTorch renames them
    add_up = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    operations = {"gather": lambda: gather(whole, part), "sum": lambda: add_up(part, whole)}
    numbers = {}
    for name, operation in operations.items():
        seconds = _slowest(_seconds(operation, job, 10)[2:])
        numbers[f"{name}_bytes_per_second"] = received / median(seconds)
    yield Result("links", numbers={"ranks": job.ranks, "received_bytes": received, **numbers})


def _trained(side: Side, make: Make, job: Job, rank: int, folder: str) -> Iterator[Result]:
    """Some steps, the digest of the weights, and steps that are timed."""
    theirs = job.found(side.beside) if side.beside else None
    if side.beside and theirs is None:
        yield Result(side.title, numbers={"skipped": f"{side.beside} has no result in this run"})
        return
    budget = 0 if theirs is None else theirs["allocated_peak_bytes"]
    taken = _memory(job)
    training = make(job, rank, budget, folder)
    first = _slowest(_seconds(training.step, job, 1))
    _seconds(training.step, job, SETTLED - 1)
    with training.readable():
        digest = digest_of(training.model)
    if side.beside:
        ts.report(training.model)  # counts from here
    seconds = _slowest(_seconds(training.step, job, job.rounds))
    report = ts.report(training.model) if side.beside else None
    numbers = {
        "step_seconds": median(seconds), "first_step_seconds": first[0],
        "tokens_per_second": job.ranks * job.batch * job.tokens / median(seconds), "ranks": job.ranks,
        "parameters": job.config.parameters, "weights": digest, **_most(taken()),
        **_gathered(training, report, seconds),
    }  # fmt: skip
    yield Result(side.title, numbers=numbers)
    yield from _compared(side, job, numbers)
    if theirs is not None:
        yield from _beside(side, job, numbers, theirs)
    if report is not None:
        yield _planned(side, job, report, numbers["step_seconds"])


def _compared(side: Side, job: Job, numbers: dict[str, Any]) -> Iterator[Result]:
    """Weights beside those of DistributedDataParallel: claimed of ours, of two ranks, if it is equal to itself."""
    first, again = job.found("ddp"), job.found("ddp-again")
    if job.side == "ddp" or first is None:
        return
    same, itself = numbers["weights"] == first["weights"], again is not None and again["weights"] == first["weights"]
    claimed = job.side == "ddp-again" or (job.ranks == 2 and itself and side.beside != "")
    claim = "weights of DistributedDataParallel" if claimed else ""
    yield Result("same bits", claim, same if claimed else None, {"same_bits": same, "steps": SETTLED})


def _beside(side: Side, job: Job, numbers: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Result]:
    """Time and memory beside the other."""
    budget, ratio = theirs["allocated_peak_bytes"], numbers["step_seconds"] / theirs["step_seconds"]
    allocated = {"allocated_peak_bytes": numbers["allocated_peak_bytes"], "budget_bytes": budget}
    within = allocated["allocated_peak_bytes"] <= budget
    yield Result("allocated", "at most the budget", None if job.dry else within, allocated)
    claim = f"no slower than {SIDES[side.beside].title}, within its memory"
    yield Result("speed", claim, None if job.dry else ratio <= 1, {"over_the_other": ratio})


def _planned(side: Side, job: Job, report: Any, measured: float) -> Result:
    """The step beside its plan. Where each rank has a copy, no plan has the sums of gradients: nothing is claimed."""
    planned = sum(plan.seconds for plan in report.plans)
    ratio = planned / measured
    claim = f"the planned makespan is between {_NEAR[0]} and {_NEAR[1]} of the measured" if side.divided else ""
    verdict = None if job.dry or not side.divided else _NEAR[0] <= ratio <= _NEAR[1]
    numbers = {
        "planned_step_seconds": planned, "planned_over_measured": ratio,
        "waited_seconds": report.wait_seconds / job.rounds,
        "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards",
        "planned_peak_bytes": max(plan.peak_nbytes for plan in report.plans),
    }  # fmt: skip
    return Result("timeline", claim, verdict, numbers)


def digest_of(model: nn.Module) -> str:
    """Of all weights, on every rank the same calls: those of a divided tensor come from all."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        found.update(whole.cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


# The ways to train


def _averaged(job: Job, rank: int, budget: int, folder: str) -> Training:
    model = on_device(quick_gpt(job.config), job.device)
    averaged = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training(model, step_of(averaged, _adamw(model), batch_of(job, rank)))


def _sharded(offload: bool, job: Job, rank: int, budget: int, folder: str) -> Training:
    """With offload each block is recomputed, as `benchmarks.gpu.contact.peers` has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = on_device(quick_gpt(job.config), "cpu")
    options: dict[str, Any] = {"mesh": init_device_mesh(job.device, (job.ranks,))}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=not job.dry)
    for block in model.blocks:  # type: ignore[union-attr]
        if offload:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, **options)
    fully_shard(model, **options)
    blocks = job.layers * job.config.block_parameters  # gathered for the forward and again for the backward
    gathered = (job.config.parameters + blocks) * job.config.dtype.itemsize * (job.ranks - 1) // job.ranks
    return Training(model, step_of(model, _adamw(model), batch_of(job, rank)), gathered=gathered)


def _ours(home: str, shard: bool, job: Job, rank: int, budget: int, folder: str) -> Training:
    """On the CPU, whose RAM is the device, blocks are on disk in the place of host memory."""
    where: dict[str, Any] = {"home": "disk", "folder": folder} if job.dry and home == "host" else {"home": home}
    peers = ts.Peers(shard=shard)
    model = ts.stream(quick_gpt(job.config), device=job.device, budget=budget, peers=peers, **where)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-4, fused=True, master=None)
    return Training(model, step_of(model, optimizer, batch_of(job, rank)), lambda: ts.whole(model))


def _side_of_ours(home: str, shard: bool, beside: str) -> Side:
    title = f"ts.Peers({'shard=True' if shard else ''}), home={home!r}"
    return Side(title, partial(_ours, home, shard), beside, shard)


SIDES = {
    "links": Side("between the GPUs", None),
    "ddp": Side("DistributedDataParallel", _averaged),
    "ddp-again": Side("DistributedDataParallel, again", _averaged),
    "fsdp2": Side("FSDP2", partial(_sharded, False)),
    "fsdp2-offload": Side("FSDP2 with CPU offload", partial(_sharded, True)),
    "copies-device": _side_of_ours("device", False, "ddp"),
    "divided-device": _side_of_ours("device", True, "fsdp2"),
    "copies-host": _side_of_ours("host", False, "fsdp2-offload"),
    "divided-host": _side_of_ours("host", True, "fsdp2-offload"),
}
"""By name, in the order in which they run."""


def batch_of(job: Job, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens of one rank, and the tokens that come next."""
    generator = torch.Generator().manual_seed(100 + rank)
    found = torch.randint(job.vocabulary, (job.batch, job.tokens + 1), generator=generator)
    return found[:, :-1].to(job.device), found[:, 1:].to(job.device)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# Time and memory


def _seconds(work: Callable[[], object], job: Job, rounds: int) -> list[float]:
    """Of this rank, which begins each round with the others."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        synchronize(job.device)
        begin = time.perf_counter()
        work()
        synchronize(job.device)
        found.append(time.perf_counter() - begin)
    return found


def _slowest(seconds: list[float]) -> list[float]:
    """Round by round, of all ranks."""
    return [max(each) for each in zip(*_told(seconds), strict=True)]


def _most(taken: dict[str, int]) -> dict[str, int]:
    """Each number, of the rank that has most."""
    every: Iterable[dict[str, int]] = _told(taken)
    return {name: max(each[name] for each in every) for name in taken}


def _told(what: Any) -> list[Any]:
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, what)
    return said


def _memory(job: Job) -> Callable[[], dict[str, int]]:
    """Asked later, bytes of the device at the peak since now; on the CPU, those that the process holds resident."""
    if not job.dry:
        return Memory(workspace_bytes(job.device)["workspaces_both_threads_bytes"]).taken
    before = process_nbytes()["VmRSS"]
    forget_resident_peak()
    return lambda: dict.fromkeys(("allocated_peak_bytes", "reserved_peak_bytes"), process_nbytes()["VmHWM"] - before)


def _gathered(training: Training, report: Any, seconds: list[float]) -> dict[str, float]:
    """Bytes that one rank receives of the others' parameters in a step, and a second."""
    nbytes = training.gathered
    moved: dict[str, int] = {}
    if report is not None:
        moved = moved_of(report, len(seconds))
        nbytes = moved.get("shard_to_device_bytes", 0)
    return {"gathered_bytes": nbytes, "gathered_bytes_per_second": nbytes / median(seconds), **moved}


if __name__ == "__main__":
    main()
