"""What fits? Models of 8, 13 and 175 billion parameters within 12 GB of the card."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.from_disk import link_seconds
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.models import LLAMA_8B, TINY, batch, llama, quick_gpt
from benchmarks.gpu.contact.results import Result
from benchmarks.gpu.contact.training import Memory, moved_of, step_of, timed, within, workspace_bytes
from benchmarks.gpu.million_layers import Job, flops_of
from benchmarks.gpu.speeds import product_flops_per_second
from tapestream.frontends.available import host_nbytes
from tapestream.models import GPTConfig

BUDGET = 12 * 10**9
TOKENS = 2048
_HOST_SHARE = 0.95  # 8B takes 112 GB at home: more than the default share of 128 GiB
_SLOWEST = 1.25  # of the longer of computing and copying


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained and by what. ``product``: rows, inner size and columns of its largest matrix product; ``flops``:
    of a step, recomputes not counted. ``falls``: whether the loss does; bfloat16 without masters rounds small steps
    away."""

    make: Callable[[], nn.Module]
    data: tuple[Tensor, Tensor]
    budget: int
    optimizer: type[torch.optim.Optimizer]
    options: dict[str, Any]
    product: tuple[int, int, int]
    flops: float
    rounds: int = 3
    falls: bool = True


def eight_billion(chosen: Chosen) -> Iterator[Result]:
    """A Llama of 8B in bfloat16, AdamW with masters in float32, everything updated in the backward."""
    shape, tokens = chosen.size(LLAMA_8B, TINY), chosen.size(TOKENS, 32)
    data = batch(shape.vocabulary, 1, tokens, chosen.device)
    options = {"lr": 1e-5, "fused": True, "master": "auto"}
    product = tokens, shape.width, shape.inner
    budget = chosen.size(BUDGET, 1_400_000)
    yield from _trained(
        Training(lambda: llama(shape), data, budget, torch.optim.AdamW, options, product, shape.flops(1, tokens)),
        chosen,
    )


def gpt_13b(chosen: Chosen) -> Iterator[Result]:
    """GPT-3 13B in bfloat16 with SGD."""
    yield from _gpt(GPTConfig.named("gpt3-13b"), chosen)


def gpt_175b(chosen: Chosen) -> Iterator[Result]:
    """GPT-3 175B in bfloat16 with SGD; its layers share the storage of one, of which a stage is half."""
    yield from _gpt(replace(GPTConfig.named("gpt3-175b"), shared=True, halves=True, tied=False), chosen)


def _gpt(config: GPTConfig, chosen: Chosen) -> Iterator[Result]:
    tokens = chosen.size(TOKENS, 32)
    if chosen.dry:
        config = replace(config, layers=4, width=64, heads=4, vocabulary=256, context=tokens)
    config = replace(config, dtype=torch.bfloat16)
    job = Job("", config, 1, tokens, 0, 0, 0)
    options = {"lr": 1e-3, "master": None}
    product, data = (tokens, config.width, 4 * config.width), batch(config.vocabulary, 1, tokens, chosen.device)
    budget = chosen.size(BUDGET, 600_000)
    training = Training(
        lambda: quick_gpt(config), data, budget, torch.optim.SGD, options, product, flops_of(job), rounds=2, falls=False
    )
    yield from _trained(training, chosen)


def _trained(training: Training, chosen: Chosen) -> Iterator[Result]:
    """Speeds of the card before there is a model beside them; then the home, a first step, and the rounds."""
    workspaces = workspace_bytes(chosen.device)
    speed = product_flops_per_second(*training.product, torch.bfloat16, chosen.device)
    machine, host = ts.measure_machine(chosen.device, quick=True), int(_HOST_SHARE * host_nbytes())
    memory, begin = Memory(workspaces["workspaces_both_threads_bytes"]), time.perf_counter()
    model = ts.stream(
        training.make(), device=chosen.device, budget=ts.Budget(training.budget, host=host), home="host",
        machine=machine, loss_chunks="auto", head="head",
    )  # fmt: skip
    homed = time.perf_counter() - begin
    say(f"weights at home after {homed:.1f} s")
    optimizer = ts.optimizer(model, training.optimizer, update="backward", **training.options)
    parameters = sum(p.numel() for p in model.parameters())
    made = {"home_seconds": homed, "optimizer_seconds": time.perf_counter() - begin - homed, "parameters": parameters}
    yield Result("home", numbers={**made, "host_budget_bytes": host, **workspaces})
    step = step_of(model, optimizer, training.data)
    first, losses = timed(step, 1, chosen)
    yield Result("first step", numbers={"first_step_seconds": first[0], "loss": losses[0], **memory.taken()})
    ts.report(model)  # counts from here
    seconds, more = timed(step, training.rounds, chosen)
    report, losses = ts.report(model), losses + more
    moved = {lane: nbytes // len(seconds) for lane, nbytes in report.bytes_moved.items()}
    bounds = {"compute_bound_seconds": training.flops / speed, "link_bound_seconds": link_seconds(moved, machine)}
    yield _speed(training, median(seconds), bounds, chosen)
    yield Result("plan", numbers={
        "planned_peak_bytes": max(plan.peak_nbytes for plan in report.plans), **moved_of(report, len(seconds)),
        "planned_step_seconds": sum(plan.seconds for plan in report.plans),
        "waited_seconds": report.wait_seconds / len(seconds),
        "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards",
    })  # fmt: skip
    good = all(map(math.isfinite, losses)) and (losses[-1] < losses[0] or not training.falls)
    yield Result("losses", "are finite" + " and fall" * training.falls, good, {"losses": losses})
    taken = memory.taken()
    allocated, reserved = within(taken, training.budget)
    yield Result("allocated", "at most the budget", allocated, {**taken, "budget_bytes": training.budget})
    yield Result("reserved", "at most 1.05 of the budget, and 64 MiB", reserved, taken)


def _speed(training: Training, step: float, bounds: dict[str, float], chosen: Chosen) -> Result:
    tokens = training.data[0].numel()
    share = max(bounds.values()) / step
    numbers = {
        "step_seconds": step, "tokens_per_second": tokens / step, "flops_per_second": training.flops / step, **bounds,
        "share_of_bound": share,
    }  # fmt: skip
    claim = f"a step takes at most {_SLOWEST} of the longer of computing and copying"
    return Result("speed", claim, chosen.of_speed(share * _SLOWEST >= 1), numbers)
