"""`report`: what a streamed model or another front end has done since it was last asked."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import reserved_nbytes
from tapestream.errors import InputError
from tapestream.executor.engines import EngineStatistics
from tapestream.frontends.chain import Chain
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.module.plans.batch import with_paces
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.program.program import Program
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.planning.plan import Plan
from tapestream.system.heap import live_nbytes, resident_nbytes
from tapestream.units import format_nbytes, format_seconds


@dataclass(frozen=True, slots=True)
class Report:
    """The last step of a streamed model, or the last call of another front end, as planned and as it went.
    ``print(report)`` shows it.

    ``plan``: that of the last call's first chain of repeated blocks; ``plans``: one for each chain. ``peak_nbytes``:
    most bytes that parameter blocks held in each tier (the plans' simulations have the tape). ``bytes_moved`` by
    (source, target) and ``wait_seconds``: sums since the last call of `report`. ``reserved_nbytes``: what PyTorch's
    allocator holds of an accelerator for the whole process, free pieces included (None on the CPU); a budget counts
    what is allocated. ``live_nbytes``: what the C library's heap has given to the whole process and not got back now,
    tensors in RAM among them (None where the library does not say). ``resident_nbytes``: RAM that the process takes
    now, with Python, PyTorch's code, and what that heap keeps of freed memory. ``cudnn_benchmark``: True if the setting
    is on; it was off inside of blocks. ``exceeded``: what `BudgetExceeded` last said of a call that holds more than its
    budget, None where none does. ``accumulation``: how many micro-batches the last call of `accumulate` was given, in
    which order they went and why, None where there was none. ``parted``: what separates each of the chains from the one
    before it.
    """

    plan: Plan
    plans: tuple[Plan, ...]
    peak_nbytes: dict[Tier, int]
    bytes_moved: dict[tuple[Tier, Tier], int]
    wait_seconds: float
    reserved_nbytes: int | None
    cudnn_benchmark: bool
    exceeded: str | None = None
    live_nbytes: int | None = field(default_factory=live_nbytes)
    resident_nbytes: int = field(default_factory=resident_nbytes)
    accumulation: str | None = None
    parted: tuple[str, ...] = ()

    def __str__(self) -> str:
        tier = self.plan.tier_name
        held = ", ".join(f"{format_nbytes(n)} {tier(where)}" for where, n in self.peak_nbytes.items() if n)
        moved = ", ".join(
            f"{format_nbytes(n)} {tier(source)} to {tier(target)}"
            for (source, target), n in self.bytes_moved.items()
            if n
        )
        return "\n".join(
            (
                *map(str, self.plans),
                *(f"chain {number} begins {why}" for number, why in enumerate(self.parted, 2)),
                "measured since the last report",
                *([f"  blocks       {held or '0 B'} at the peak, without tape"] if self.peak_nbytes else []),
                f"  moved        {moved or 'nothing'}",
                f"  waited       {format_seconds(self.wait_seconds)} for copies",
                *self._of_the_device(),
                f"  memory       {format_nbytes(self.resident_nbytes)} of RAM for the whole process, now{self._live()}",
                *([] if self.exceeded is None else [f"  exceeded     {self.exceeded}"]),
                *([] if self.accumulation is None else [f"  accumulated  {self.accumulation}"]),
            )
        )

    def _live(self) -> str:
        return "" if self.live_nbytes is None else f"; {format_nbytes(self.live_nbytes)} live in the C library's heap"

    def _of_the_device(self) -> list[str]:
        lines = []
        if self.reserved_nbytes is not None:
            lines.append(f"  reserved     {format_nbytes(self.reserved_nbytes)} by PyTorch's allocator, for all models")
        if self.cudnn_benchmark:
            lines.append(
                "  cudnn        torch.backends.cudnn.benchmark is off in blocks, whose recomputes repeat kernels"
            )
        return lines


def report(model: nn.Module | Program) -> Report:
    """What a streamed model, a `Chain`, `Join`, `Loop` or `Program` has done since the last report. Raises InputError
    before its first step."""
    if isinstance(model, (Chain, Loop, Program)):
        return _report_of(model)
    handle = handle_of(model)
    if handle.last is None:
        raise InputError("report: this model has not been called with gradients yet; run a training step first")
    moved, waited = handle.homes.statistics_since()
    held = {tier: handle.pool.peak_nbytes(tier) for tier in MEMORIES}
    on_accelerator, plans = is_accelerator(handle.device), list(handle.last.plans)
    plans[handle.last.main] = found = with_paces(handle.last, handle.longest.prepared)
    return Report(
        found, tuple(plans), held, moved, waited,
        reserved_nbytes(handle.device) if on_accelerator else None,
        on_accelerator and torch.backends.cudnn.benchmark, handle.exceeded.last,
        accumulation=handle.accumulation.said,
        parted=tuple(one.parted for one in handle.last.segments if one.parted is not None),
    )  # fmt: skip


_COUNTED: "weakref.WeakKeyDictionary[Any, EngineStatistics]" = weakref.WeakKeyDictionary()
"""What the last report of a front end has counted."""


def _report_of(front: Chain | Loop | Program) -> Report:
    if front.plan is None:
        raise InputError(
            f"report: this {type(front).__name__} has not been called with gradients yet; run a training step first"
        )
    now, before = front.copies, _COUNTED.get(front, EngineStatistics({}, 0, 0.0))
    _COUNTED[front] = now
    moved = {lane: n - before.bytes_moved.get(lane, 0) for lane, n in now.bytes_moved.items()}
    said = front.exceeded.last
    return Report(front.plan, (front.plan,), {}, moved, now.wait_seconds - before.wait_seconds, None, False, said)
