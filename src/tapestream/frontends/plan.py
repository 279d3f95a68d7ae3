"""`plan`, `verify`: look before running, and check one step against plain PyTorch."""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tapestream.costs import Budget, Machine
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.executor.away import AwayGradient
from tapestream.frontends.chain import Chain
from tapestream.frontends.given import Arguments, arguments_of
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.module.calls.longest import Longest
from tapestream.frontends.module.calls.profiling import Timings
from tapestream.frontends.module.plans.batch import with_paces
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.stream import handle_of, is_streamed, stream, unstream
from tapestream.frontends.module.streamed import Streamed
from tapestream.frontends.module.whole import whole
from tapestream.frontends.outlines.planned import ByShapes, has_only_shapes, is_elsewhere, planned_by_shapes
from tapestream.frontends.planned_calls import plan_of_call
from tapestream.frontends.program.program import Program
from tapestream.frontends.suggested import head_of, helped, remedies_for, seconds_of, tried, tried_with
from tapestream.peers.sums import sum_over_ranks
from tapestream.planning.plan import Plan
from tapestream.planning.profile import undisturbed
from tapestream.planning.remedy import Remedy
from tapestream.runner.stage import Stage
from tapestream.runner.trees import tree_leaves


def plan(
    model: nn.Module | Program,
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
    batch that will come, in the same form, or the shape of its first tensor (None: that of ``stream(..., longest=)``,
    if any). It is planned as well, and `Plan.paces` says how fast both are. ``suggest``: try what would make the step
    faster (the loss in chunks, updates in the backward, a smaller batch several times over): `Plan.remedies` has it, or
    the BudgetError says it. Each takes a profile and a plan.

    A streamed model is planned as it is. So is a call of a `Chain`, `Join`, `Loop` or `Program`, which is not made: a
    function runs once, of a loop two steps. There ``suggest`` tries a folder, ``planner="auto"`` and smaller batches.
    A model runs once to be profiled; weights, gradients, buffers and random generators stay as they are. If it has
    several chains of blocks, the plan is that of its first chain of repeated blocks. Later plans of a model that is not
    streamed take the seconds that the first one measured.

    Nothing runs where the model (without ``weights=``) or the batch is on the meta device, and where ``device="cuda"``
    is not here and ``machine`` says how fast it is: then the plan is made from shapes alone. It has the numbers of
    ``tapestream plan``, and its defaults: where ``machine`` is silent, the usual speeds; this machine's RAM and disk
    without ``Budget(host=, disk=)``; ``home="auto"`` is RAM (the disk, on the CPU) and for what finds no room the disk;
    ``optimizer="adamw"``, ``update="step"`` and ``where="device"`` may be given. `Plan.step` has the whole step.

    Raises BudgetError if nothing fits, or not for the longest batch, and InputError for arguments without effect.
    """
    given = {"budget": budget, "device": device, "machine": machine, **arguments}
    if isinstance(model, Chain | Loop | Program):
        _check_nothing_given(f"a {type(model).__name__}, which has options of its own", given | {"longest": longest})
        return plan_of_call(model, batch, suggest=suggest)
    args, kwargs = arguments_of(batch)
    if not is_streamed(model) and _needs_no_run(model, args, kwargs, given):
        told = {name: value for name, value in given.items() if value is not None}
        return planned_by_shapes(model, args, kwargs, longest, ByShapes.of(told), suggest=suggest)
    _check_runs(model, args, kwargs, arguments)
    planned = partial(_planned, args=args, kwargs=kwargs, longest=longest, suggest=suggest)
    if is_streamed(model):
        _check_nothing_given("a model that is streamed already", given)
        found = planned(handle_of(model))
    else:
        with _streamed(model, given) as handle:
            found = planned(handle)
            head = head_of(model, handle.blocks[: handle.wide])
        if suggest and given.get("loss_chunks") is None:
            change = {"loss_chunks": "auto"} | ({} if head is None else {"head": head})
            text = f"stream(..., {', '.join(f'{name}={value!r}' for name, value in change.items())})"
            base = None if found.prepared is None else found.prepared.plans
            found.remedies += tried(text, partial(_otherwise, model, given | change, *found.call), base)
    if found.refusal is not None:
        raise helped(found.refusal, found.remedies)
    assert found.plan is not None
    assert found.prepared is not None
    return replace(found.plan, remedies=remedies_for(found.remedies, seconds_of(found.prepared)))


def _check_nothing_given(what: str, given: Mapping[str, Any]) -> None:
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        raise InputError(f"plan: {asked[0]}= has no effect on {what}; leave it out")


def _needs_no_run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether shapes are all that there is, and all that is needed."""
    there = given.get("weights") is not None and not has_only_shapes(nn.Identity(), args, kwargs)
    return is_elsewhere(given["device"], given["machine"]) or (has_only_shapes(model, args, kwargs) and not there)


def _check_runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Raise InputError for what only plans by shapes know, and for tensors on the meta device beside a streamed
    model."""
    for name in ("optimizer", "update", "where"):
        if name in given:
            raise InputError(
                f"plan: {name}= counts where shapes alone are planned (the model or the batch is on meta). Where the "
                "weights are there, call ts.stream(model, ...) and ts.optimizer(model, ...), then ts.plan(model, batch)"
            )
    if has_only_shapes(nn.Identity(), args, kwargs):
        raise InputError(
            f"plan: a tensor of the batch is on the meta device, but this {type(model).__name__} is streamed already, "
            "and runs once to be profiled; give a batch with numbers, as torch.zeros makes it"
        )


_TIMINGS: "weakref.WeakKeyDictionary[nn.Module, Timings]" = weakref.WeakKeyDictionary()
"""Of models that are streamed for a plan alone: one profile serves all budgets that are asked about."""


@contextlib.contextmanager
def _streamed(model: nn.Module, arguments: dict[str, Any]) -> Iterator[Streamed]:
    handle = handle_of(stream(model, **arguments))
    handle.timings = _TIMINGS.setdefault(model, Timings())
    try:
        yield handle
    finally:
        unstream(model)


def _otherwise(
    model: nn.Module, given: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Plan]:
    with _streamed(model, given) as handle:
        return handle.prepare_for(args, kwargs).plans


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
        announced.plan(handle, args, kwargs)
        found.prepared = handle.prepare_for(args, kwargs)
        found.plan = with_paces(found.prepared, announced.prepared)
    except BudgetError as error:
        if not suggest:
            raise
        found.refusal = error.to_keep()
        if announced.arguments is not None and announced.prepared is None:
            found.call = announced.arguments
    if suggest:
        found.remedies = tried_with(handle, *found.call, found.prepared)
    return found


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
