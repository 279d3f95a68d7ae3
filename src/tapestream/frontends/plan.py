"""`plan`, `report`, `verify`: look before running, look after running, and check one step against plain PyTorch."""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import reserved_nbytes
from tapestream.costs import Budget, Machine
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.executor.away import AwayGradient
from tapestream.executor.engines import EngineStatistics
from tapestream.frontends.chain import Chain
from tapestream.frontends.given import Arguments, arguments_of
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.module.calls.longest import Longest
from tapestream.frontends.module.plans.batch import paces_of
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.stream import handle_of, is_streamed, stream, unstream
from tapestream.frontends.module.streamed import Streamed
from tapestream.frontends.module.whole import whole
from tapestream.frontends.program.program import Program
from tapestream.frontends.suggested import head_of, helped, remedies_for, seconds_of, tried, tried_with
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.peers.sums import sum_over_ranks
from tapestream.planning.plan import Plan
from tapestream.planning.profile import undisturbed
from tapestream.planning.remedy import Remedy
from tapestream.runner.stage import Stage
from tapestream.runner.trees import tree_leaves
from tapestream.system.heap import live_nbytes, resident_nbytes
from tapestream.units import format_nbytes, format_seconds


def plan(
    model: nn.Module,
    batch: Any,
    *,
    longest: Any = None,
    suggest: bool = False,
    budget: Budget | str | int | None = None,
    device: torch.device | str | None = None,
    machine: Machine | None = None,
    **arguments: Any,
) -> Plan:
    """The Plan that ``stream(model, budget=budget, ...)`` would make for a call with ``batch``: a tensor, a tuple or
    list of arguments, or a mapping of arguments by name (as tokenizers and loaders give). ``longest``: the longest
    batch that will come, in the same form (None: that of ``stream(..., longest=)``, if any). It is planned as well, and
    `Plan.paces` says how fast both are. ``suggest``: try what would make the step faster (the loss in chunks,
    updates in the backward, a smaller batch several times over): `Plan.remedies` has it, or the BudgetError says it.
    Each takes a profile and a plan.

    A streamed model is planned as it is. The model runs once to be profiled; weights, gradients, buffers and random
    generators stay as they are. If a model has several chains of blocks, the plan is that of its first chain of
    repeated blocks. Raises BudgetError if nothing fits, or not for the longest batch, and InputError for a batch
    without numbers (on the meta device), with which nothing can run.
    """
    args, kwargs = arguments_of(batch)
    _check_has_numbers(args, kwargs)
    planned = partial(_planned, args=args, kwargs=kwargs, longest=longest, suggest=suggest)
    given = {"budget": budget, "device": device, "machine": machine, **arguments}
    if is_streamed(model):
        asked = [name for name, value in given.items() if value is not None]
        if asked:
            raise InputError(f"plan: {asked[0]}= has no effect on a model that is streamed already; leave it out")
        found = planned(handle_of(model))
    else:
        with _streamed(model, given) as handle:
            found = planned(handle)
            head = head_of(model, handle.blocks[: handle.wide])
        if suggest and given.get("loss_chunks") is None:
            change = {"loss_chunks": "auto"} | ({} if head is None else {"head": head})
            text = f"stream(..., {', '.join(f'{name}={value!r}' for name, value in change.items())})"
            found.remedies += tried(text, partial(_otherwise, model, given | change, *found.call), found.prepared)
    if found.refusal is not None:
        raise helped(found.refusal, found.remedies)
    assert found.plan is not None
    assert found.prepared is not None
    return replace(found.plan, remedies=remedies_for(found.remedies, seconds_of(found.prepared)))


def _check_has_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise InputError for tensors on the meta device."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            raise InputError(
                f"plan: a tensor of shape {tuple(leaf.shape)} of the batch is on the meta device, and the model runs "
                "once to be profiled; give one with numbers, as torch.zeros makes it. To plan without a run and "
                "without weights: `tapestream plan module:factory`"
            )


@contextlib.contextmanager
def _streamed(model: nn.Module, arguments: dict[str, Any]) -> Iterator[Streamed]:
    stream(model, **arguments)
    try:
        yield handle_of(model)
    finally:
        unstream(model)


def _otherwise(
    model: nn.Module, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Prepared]:
    with _streamed(model, given) as handle:
        return [handle.prepare_for(args, kwargs)]


@dataclass(slots=True)
class _Found:
    """A plan, or why there is none; ``remedies``: tried for ``call``, the arguments of the one that was refused, or of
    the user's."""

    call: Arguments
    plan: Plan | None = None
    prepared: Prepared | None = None
    refusal: BudgetError | None = None
    remedies: list[Remedy] = field(default_factory=list)


def _planned(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any], longest: Any, *, suggest: bool) -> _Found:
    """The plan, or with ``suggest`` why there is none, and what was tried beside it."""
    announced, found = handle.longest if longest is None else Longest(longest), _Found((args, kwargs))
    try:
        announced.plan(handle)
        found.prepared = handle.prepare_for(args, kwargs)
        found.plan = _with_paces(found.prepared, announced)
    except BudgetError as error:
        if not suggest:
            raise
        found.refusal = error.to_keep()
        if announced.arguments is not None and announced.prepared is None:
            found.call = announced.arguments
    if suggest:
        found.remedies = tried_with(handle, *found.call, found.prepared)
    return found


def _with_paces(prepared: Prepared, announced: Longest) -> Plan:
    """The plan of ``prepared``, with how fast it is beside the longest call that was announced."""
    if announced.prepared is None:
        return prepared.plan
    return replace(prepared.plan, paces=paces_of(prepared, announced.prepared))


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
    which order they went and why, None where there was none.
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
    plans[handle.last.main] = found = _with_paces(handle.last, handle.longest)
    return Report(
        found, tuple(plans), held, moved, waited,
        reserved_nbytes(handle.device) if on_accelerator else None,
        on_accelerator and torch.backends.cudnn.benchmark, handle.exceeded.last,
        accumulation=handle.accumulation.said,
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


def verify(model: nn.Module, batch: Any) -> None:
    """Compare one forward and backward of a streamed model, bit for bit, with plain PyTorch that stores everything.

    ``batch``: as in `plan`. Differentiated is the model's own loss (``loss`` in what it returns), or the sum of all
    that it returns if it has none. Needs memory for the plain step, which runs twice: what differs between its two runs
    is not compared, and a warning says so. Weights, gradients, buffers and generators are afterwards as before. Of
    several ranks (``peers=``) every one verifies, with a batch of its own: sums are compared. Raises
    GradientError naming the first parameter whose gradient differs, or if nothing could be compared.
    """
    handle = handle_of(model)
    arguments = arguments_of(batch)
    if handle.update == "backward":
        raise InputError(
            "verify: with update='backward' a step changes the weights; verify before making the optimizer"
        )
    with whole(model):  # those that are divided make room for others
        kept = [p.grad.clone() if isinstance(p.grad, AwayGradient) else p.grad for p in model.parameters()]
    try:
        with whole(model):
            streamed = _gradients(model, arguments, handle.device)
        handle.store.settle()
        with handle.bypassed():
            plain, again = (_summed(handle, _gradients(model, arguments, handle.device)) for _ in range(2))
    finally:
        for p, gradient in zip(model.parameters(), kept, strict=True):
            p.grad = gradient
    unsteady = [name for name in plain if _differ(plain[name], again[name])]
    if len(unsteady) == len(plain):
        raise GradientError(
            "verify: two runs of plain PyTorch itself differ in everything, so nothing can be compared: the model is "
            "not deterministic; draw its random numbers from PyTorch's generators, and see whether "
            "torch.use_deterministic_algorithms(True) helps"
        )
    if unsteady:
        warnings.warn(
            f"verify: plain PyTorch itself gives other bits of {unsteady[0]} in a second run (and of "
            f"{len(unsteady) - 1} more), and these were not compared. Some kernels add in the order in which threads "
            "arrive; torch.use_deterministic_algorithms(True) chooses others"
        )
    for name in plain:
        if name not in unsteady and _differ(plain[name], streamed[name]):
            raise GradientError(
                f"verify: {name} differs between the planned and the stored step; is some block not deterministic? "
                "stream(..., verify=True) finds it"
            )


def _gradients(model: nn.Module, arguments: Arguments, device: torch.device) -> dict[str, torch.Tensor | None]:
    for p in model.parameters():
        p.grad = None
    with undisturbed((Stage(0, model),), device):
        args, kwargs = arguments
        result = model(*args, **kwargs)
        own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
        roots = _differentiable(own) or _differentiable(result)
        loss = torch.stack([t.float().sum() for t in roots]).sum()
        torch.autograd.backward(loss)
    found = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    found["the loss"] = loss.detach()
    return found


def _summed(handle: Streamed, found: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Gradients of plain PyTorch over all ranks: those of blocks are summed here, the others are already."""
    exchange = handle.ranks.exchange
    if exchange is None:
        return found
    inside = {id(p) for block in handle.store.blocks for p in block.parameters}
    inside -= set(map(id, handle.pinned.parameters()))
    names = [name for name, p in handle.model.named_parameters() if id(p) in inside]
    scaled = [None if (gradient := found[name]) is None else gradient * exchange.scale for name in names]
    divided = handle.homes.shards
    summed = sum_over_ranks(scaled, exchange.agreement.group) if divided is None else divided.ordered(scaled)
    return found | dict(zip(names, summed, strict=True))


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.requires_grad]


def _differ(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is not b
    return not _same_bits(a, b)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.cpu(), b.cpu()
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
