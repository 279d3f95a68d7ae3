"""Does a budget hold? A GPT trained within a third of the memory that plain PyTorch takes for it."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.models import batch, on_device, quick_gpt
from benchmarks.gpu.contact.results import Result
from benchmarks.gpu.contact.training import Memory, moved_of, step_of, timed, within, workspace_bytes
from tapestream.models import GPTConfig

ROUNDS = 3
_PLANNED_SLACK = 2 * 2**20


def third(chosen: Chosen) -> Iterator[Result]:
    """Plain PyTorch twice, to know what it takes and whether it is equal to itself; then ours at a third."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    real = GPTConfig(24, 1024, 16, vocabulary=8192, context=1024)
    config = chosen.size(real, GPTConfig(6, 128, 4, vocabulary=256, context=64))
    data = batch(config.vocabulary, chosen.size(8, 2), config.context, chosen.device)
    workspaces = workspace_bytes(chosen.device)
    say(f"{config.parameters / 1e6:.0f} million parameters; workspaces {workspaces}")
    took = workspaces["workspaces_both_threads_bytes"]
    taken, seconds, expected = _plain(config, data, took, chosen)
    _, _, again = _plain(config, data, took, chosen)
    itself = _same(expected, again)
    numbers: dict[str, Any] = {**workspaces, "parameters": config.parameters, "step_seconds": min(seconds), **taken}
    yield Result("plain PyTorch", "is equal to itself, bit for bit", itself, numbers)
    budget = taken["allocated_peak_bytes"] // 3
    say(f"plain PyTorch takes {taken['allocated_peak_bytes'] / 2**30:.3f} GiB; ours gets {budget / 2**30:.3f} GiB")
    del again
    yield from _ours(config, data, took, budget, expected, chosen)


def _plain(
    config: GPTConfig, data: tuple[Tensor, Tensor], workspaces: int, chosen: Chosen
) -> tuple[dict[str, int], list[float], list[Tensor]]:
    memory = Memory(workspaces)
    model = on_device(quick_gpt(config), chosen.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds, losses = timed(step_of(model, optimizer, data), ROUNDS, chosen)
    taken, left = memory.taken(), _left(model, losses)
    del model, optimizer
    gc.collect()
    return taken, seconds, left


def _ours(
    config: GPTConfig, data: tuple[Tensor, Tensor], workspaces: int, budget: int, expected: list[Tensor], chosen: Chosen
) -> Iterator[Result]:
    machine = ts.measure_machine(chosen.device, quick=True)  # takes 64 MiB of the device by itself
    memory = Memory(workspaces)
    model = ts.stream(quick_gpt(config), device=chosen.device, budget=budget, home="host", machine=machine)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-4, fused=True)
    seconds, losses = timed(step_of(model, optimizer, data), ROUNDS, chosen)
    taken, report = memory.taken(), ts.report(model)
    planned = max(plan.peak_nbytes for plan in report.plans)
    numbers = {
        "budget_bytes": budget, "planned_peak_bytes": planned, **taken, "step_seconds": min(seconds),
        "first_step_seconds": seconds[0], "planned_step_seconds": sum(plan.seconds for plan in report.plans),
        "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards", **moved_of(report, len(seconds)),
    }  # fmt: skip
    allocated, reserved = within(taken, budget)
    close = taken["allocated_peak_bytes"] <= 1.02 * planned + _PLANNED_SLACK
    yield Result("bits", "weights and losses of plain PyTorch", _same(expected, _left(model, losses)), numbers)
    yield Result("allocated", "at most the budget", allocated, taken | {"budget_bytes": budget})
    yield Result(
        "planned",
        "allocated at most 1.02 of what was planned, and 2 MiB",
        close,
        taken | {"planned_peak_bytes": planned},
    )
    yield Result("reserved", "at most 1.05 of the budget, and 64 MiB", reserved, taken | {"budget_bytes": budget})


def _left(model: nn.Module, losses: list[float]) -> list[Tensor]:
    """What training leaves behind, on the CPU."""
    return [torch.tensor(losses), *(p.detach().to("cpu", copy=True) for p in model.parameters())]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
