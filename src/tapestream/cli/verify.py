"""``tapestream verify``: are gradients within a budget those of plain PyTorch, bit for bit?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn
from torch.utils import _pytree as pytree

import tapestream as ts
from tapestream.cli import show
from tapestream.cli.checks import check_homes
from tapestream.cli.chosen import chosen_device
from tapestream.cli.costs import costs_of
from tapestream.cli.machine import name
from tapestream.cli.processes import any_of_ranks, group, rank
from tapestream.cli.subject import Subject, subject_of
from tapestream.cli.targets import TargetOptions
from tapestream.cli.told import told
from tapestream.costs.rates import usual_rates
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.available import free_nbytes
from tapestream.frontends.module.plans.divide import Division
from tapestream.frontends.module.plans.prepare import terms_of
from tapestream.frontends.module.stream import handle_of
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.fake import NeedsNumbers
from tapestream.planning.auto import make_plan
from tapestream.units import format_nbytes


def verified(
    target: str, wish: TargetOptions, device: str, budget: str | None, host_budget: str | None, home: str,
    folder: Path | None, steps: int, json_: bool, shard: bool,
) -> None:  # fmt: skip
    """Compare steps; under torchrun with what all processes together would do in plain PyTorch, each with samples of
    its own. ``shard``: they divide one copy. Raises typer.Exit(1) where some bit differs."""
    ranks, chosen = group(chosen_device(device))
    peers = None if ranks == 1 else ts.Peers(shard=shard)
    check_homes(chosen, home, folder, host_budget)
    subject = subject_of(target, wish)
    _check_room(subject, chosen)
    torch.manual_seed(0)
    model: nn.Module = _ByPosition(subject.make(), tuple(subject.arguments(1)[1]))
    model = ts.stream(
        model, device=chosen, budget=ts.Budget(budget, host=host_budget), home=home, folder=folder,
        blocks=subject.blocks or None, peers=peers,
    )  # fmt: skip
    with show.progress() as advance:
        found = []
        for number in range(steps):
            try:
                found.append(_step(model, subject, number, chosen))
            except BudgetError as error:
                raise _advised(error, subject) from error
            advance("comparing", number + 1, steps, "")
    ts.unstream(model)
    differs = any_of_ranks(any(row["differs"] for row in found), chosen)
    _say(subject, found, chosen, json_, ranks)
    if differs:
        raise typer.Exit(1)


class _ByPosition(nn.Module):
    """The model with its last arguments named: `tapestream.verify` calls by position."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Any) -> Any:
        """What the model returns."""
        split = len(values) - len(self.names)
        return self.model(*values[:split], **dict(zip(self.names, values[split:], strict=True)))


def _check_room(subject: Subject, device: str) -> None:
    """Refuse a model whose plain step, with two copies of all gradients beside it, does not fit what is free."""
    try:
        costs = costs_of(subject, device)
        profiles = costs.profiles(subject.batch, rates=usual_rates(device), optimizer="sgd", update="step")
    except NeedsNumbers:
        return  # whether it fits will be seen when it runs
    gradients = sum(block.gradient_nbytes for profile in profiles for block in profile.blocks)
    again = profiles[0].outside_nbytes * (len(profiles) - 1)
    stored = sum(make_plan(profile, planner="store_all").peak_nbytes for profile in profiles) - again
    free = free_nbytes(torch.device(device))
    if stored + 2 * gradients > free:
        raise InputError(
            f"{subject.name} takes about {format_nbytes(stored + 2 * gradients)} for plain PyTorch's step of "
            f"{subject.step(subject.batch)} and two copies of its gradients, but {format_nbytes(free)} are free; "
            "verify fewer layers of it, or a smaller --batch or --seq"
        )


def _advised(error: BudgetError, subject: Subject) -> BudgetError:
    """``error``, with options in place of arguments of Python."""
    text, calls, _ = str(error).partition(": for a linear head")
    options = "--batch" if subject.sequence is None else "--seq and --batch"
    if subject.config is not None:
        options = f"--vocabulary, {options}"
    if calls:
        text = f"{text}: it grows with {options}"
    return BudgetError(text, least_nbytes=error.least_nbytes, stage=error.stage)


def _step(model: nn.Module, subject: Subject, number: int, device: str) -> dict[str, Any]:
    torch.manual_seed(number + 1_000 * rank())
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), subject.arguments(subject.batch))
    differs = None
    try:
        ts.verify(model, (*args, *kwargs.values()))
    except GradientError as error:
        differs = told(str(error))
    handle = handle_of(model)
    last, allowed = handle.last, handle.budget.device_nbytes
    assert last is not None
    assert allowed is not None
    outside = last.profiles[0].outside_nbytes
    plans = Answer(Division(terms_of(handle), last.segments, last.profiles, allowed, outside, last.shared), last.plans)
    found = [plan.simulation for plan in last.plans]
    return {
        "step": number + 1, "differs": differs, "planner": plans.planner,
        "blocks": sum(len(plan.profile) for plan in last.plans), "forwards": sum(one.forwards for one in found),
        "planned_peak_nbytes": plans.peak_nbytes(ts.Tier.DEVICE),
        "planned_moved_nbytes": sum(sum(one.bytes_moved.values()) for one in found),
    }  # fmt: skip


def _say(subject: Subject, found: Sequence[dict[str, Any]], device: str, json_: bool, ranks: int) -> None:
    equal = not any(row["differs"] for row in found)
    if json_:
        show.as_json({"model": subject.name, "ranks": ranks, "equal": equal, "steps": list(found)})
        return
    rows = [
        (
            str(row["step"]),
            f"{row['planner']}, {row['forwards']} forwards of {row['blocks']} blocks",
            format_nbytes(row["planned_peak_nbytes"]),
            format_nbytes(row["planned_moved_nbytes"]),
            "differs" if row["differs"] else "every bit equal",
        )
        for row in found
    ]
    columns = ("step", "plan", f"planned peak in {name(ts.Tier.DEVICE, device)}", "moved by plan", "loss and gradients")
    show.table(f"{subject.name}, {subject.step(subject.batch)}", rows, columns)
    for row in found:
        if row["differs"]:
            show.failure(row["differs"])
            return
    among = "" if ranks == 1 else f" that runs the samples of {ranks} processes in turn"
    show.line(f"Equal to plain PyTorch{among} in {len(found)} steps: the loss and the gradient of every parameter.")
