"""Steps of training, their seconds, and the memory that they take."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.gpu.contact.chosen import Chosen, say

RESERVED_SLACK = 64 * 2**20


def step_of(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """One step as a function; the loss, which the host does not wait for."""

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(
    step: Callable[[], Tensor], rounds: int, chosen: Chosen, spare: float = 5.0
) -> tuple[list[float], list[float]]:
    """Seconds and losses of each step; fewer rounds where the next would leave less than ``spare`` seconds."""
    seconds: list[float] = []
    losses: list[float] = []
    for number in range(rounds):
        if seconds and chosen.left_seconds < spare + max(seconds):
            break
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        say(f"step {number + 1}: {seconds[-1]:.3f} s, loss {losses[-1]:.5g}")
    return seconds, losses


class Memory:
    """Most bytes of the device allocated and reserved since this was made, beyond what was there then; ``workspaces``
    of libraries, which were there, are part of what a budget covers."""

    def __init__(self, workspaces: int = 0) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.allocated = torch.cuda.memory_allocated() - workspaces
        self.reserved = torch.cuda.memory_reserved() - workspaces

    def taken(self) -> dict[str, int]:
        """The two figures."""
        torch.cuda.synchronize()
        return {
            "allocated_peak_bytes": torch.cuda.max_memory_allocated() - self.allocated,
            "reserved_peak_bytes": torch.cuda.max_memory_reserved() - self.reserved,
        }


def within(taken: Mapping[str, int], budget: int) -> tuple[bool, bool]:
    """Whether what was allocated is within the budget, and what was reserved within 1.05 of it and 64 MiB."""
    reserved = taken["reserved_peak_bytes"] <= 1.05 * budget + RESERVED_SLACK
    return taken["allocated_peak_bytes"] <= budget, reserved


def workspace_bytes(device: str) -> dict[str, int]:
    """What cuBLAS takes at its first product: on this thread, and on this one and the one that runs backwards. To be
    asked once in a process, before any other product."""
    before = torch.cuda.memory_allocated()
    x = torch.ones(64, 64, device=device, requires_grad=True)
    y = x @ x
    torch.cuda.synchronize()
    forward = torch.cuda.memory_allocated() - before - 2 * x.nbytes
    y.sum().backward()
    del x, y
    torch.cuda.synchronize()
    return {
        "workspace_forward_bytes": max(0, forward),
        "workspaces_both_threads_bytes": max(0, torch.cuda.memory_allocated() - before),
    }


def moved_of(report: "ts.frontends.plan.Report", steps: int) -> dict[str, int]:
    """Bytes a step between tiers."""
    return {
        f"{source.name.lower()}_to_{target.name.lower()}_bytes": nbytes // steps
        for (source, target), nbytes in report.bytes_moved.items()
    }
