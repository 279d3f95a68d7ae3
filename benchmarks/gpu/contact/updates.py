"""Updates in RAM: whether the CPU's kernels give the card's bits, and a GPT trained with them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.models import batch, quick_gpt
from benchmarks.gpu.contact.results import Result
from benchmarks.gpu.contact.training import step_of, timed
from tapestream.frontends.module.stream import handle_of
from tapestream.models import GPTConfig

ROUNDS = 4
_STEPS, _NUMBERS = 8, 2**20
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}), "adam": (torch.optim.Adam, {}),
    "adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {}), "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}), "rmsprop": (torch.optim.RMSprop, {}), "nadam": (torch.optim.NAdam, {}),
}  # fmt: skip
HOW: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True},
}  # fmt: skip


def in_ram(chosen: Chosen) -> Iterator[Result]:
    """Every optimizer on both; then a GPT whose blocks are updated on the card, and in RAM."""
    for name in OPTIMIZERS:
        yield Result(f"bits of {name}", numbers=_agreement(name, chosen))
    config = chosen.size(
        GPTConfig(24, 1024, 16, vocabulary=8192, context=1024), GPTConfig(6, 128, 4, vocabulary=256, context=64)
    )
    data = batch(config.vocabulary, chosen.size(8, 2), config.context, chosen.device)
    budget, took = chosen.size(6 * 2**30, 2**24), dict[str, float]()
    machine = ts.measure_machine(chosen.device)
    for where in ("device", "host"):
        for update in ("step", "backward"):
            seconds, planned, numbers = _trained(config, data, budget, machine, where, update, chosen)
            took[f"{where}, {update}"] = seconds
            close = abs(seconds - planned) <= 0.1 * planned
            claim = "a step takes within 10% of what was planned" if where == "host" else ""
            yield Result(f"{where}, {update}", claim, chosen.of_speed(close) if claim else None, numbers)
    faster = all(took[f"host, {update}"] < took[f"device, {update}"] for update in ("step", "backward"))
    yield Result(
        "updates in RAM", "faster than on the card, whose state passes the link", chosen.of_speed(faster), took
    )
    yield _exact(config, data, budget, machine, chosen)


def _agreement(name: str, chosen: Chosen) -> dict[str, str]:
    """For each kernel of the card, those of the CPU that end in the same bits."""
    ends: dict[tuple[str, str], Tensor] = {}
    for device in ("cpu", chosen.device):
        for how, options in HOW.items():
            try:
                ends[device, how] = _stepped(name, device, options)
            except (RuntimeError, TypeError, ValueError):  # it has no such kernel
                continue
    return {
        how: ", ".join(other for (d, other), end in ends.items() if d == "cpu" and torch.equal(end, found)) or "none"
        for (device, how), found in ends.items()
        if device != "cpu"
    }


def _stepped(name: str, device: str, how: dict[str, Any]) -> Tensor:
    make, options = OPTIMIZERS[name]
    drawn = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(_NUMBERS, generator=drawn).to(device))
    optimizer = make([parameter], lr=1e-3, **options, **how)
    for scale in torch.logspace(-4, 3, _STEPS).tolist():
        parameter.grad = (torch.randn(_NUMBERS, generator=drawn) * scale).to(device)
        optimizer.step()
    return parameter.detach().cpu()


def _trained(
    config: GPTConfig, data: tuple[Tensor, Tensor], budget: int, machine: ts.Machine, where: str, update: str,
    chosen: Chosen,
) -> tuple[float, float, dict[str, Any]]:  # fmt: skip
    model = ts.stream(quick_gpt(config), device=chosen.device, budget=budget, home="host", machine=machine)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-4, update=update, where=where)
    seconds, _ = timed(step_of(model, optimizer, data), ROUNDS, chosen)
    report = ts.report(model)
    planned = sum(plan.seconds for plan in report.plans)
    numbers = {
        "step_seconds": min(seconds), "planned_step_seconds": planned, "under_way": _under_way(model),
        "host_updates_per_second": machine.host_updates_per_second, "parameters": config.parameters,
    }  # fmt: skip
    ts.unstream(model)
    return min(seconds), planned, numbers


def _under_way(model: nn.Module) -> int:
    return len(handle_of(model).store.copies.on_host.under_way)


def _exact(config: GPTConfig, data: tuple[Tensor, Tensor], budget: int, machine: ts.Machine, chosen: Chosen) -> Result:
    """Weights after three steps, of which nobody looks at anything, and after three that wait for every update."""
    found = []
    for waits in (False, True):
        model = ts.stream(quick_gpt(config), device=chosen.device, budget=budget, home="host", machine=machine)
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-4, where="host")
        step = step_of(model, optimizer, data)
        for _ in range(3):
            step()
            if waits:
                optimizer.settle()
        found.append([p.detach().cpu().clone() for p in model.parameters()])
        ts.unstream(model)
        say(f"waits {waits}: done")
    same = all(map(torch.equal, *found))
    return Result("late updates", "the bits of a run that waits for each", same)
