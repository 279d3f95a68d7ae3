"""A plan from shapes alone: of a model or batch on the meta device, or for a GPU that is elsewhere."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tapestream.accelerator.device import default_device, is_present
from tapestream.costs import Budget, Machine
from tapestream.costs.machine import usual_links
from tapestream.errors import BudgetError, InputError
from tapestream.frontends.available import free_nbytes
from tapestream.frontends.given import Arguments, check_kinds
from tapestream.frontends.loss import Chunks
from tapestream.frontends.module.blocks import BlockNames, named_modules
from tapestream.frontends.module.calls.longest import LONGEST_CALL
from tapestream.frontends.module.calls.refused import first_part, samples_of
from tapestream.frontends.module.calls.sizes import longest_of
from tapestream.frontends.module.plans.batch import batch_of
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.optimizers import checked
from tapestream.frontends.outlines.outline import Outline
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.question import Question, Variant
from tapestream.frontends.suggested import helped, remedies_for
from tapestream.ir.actions import MEMORIES, Tier
from tapestream.planning.pace import Pace
from tapestream.planning.plan import Plan
from tapestream.planning.remedy import Remedy
from tapestream.planning.where import Where
from tapestream.planning.whole_step import WholeStep
from tapestream.runner.private import tensors_in
from tapestream.runner.trees import tree_leaves
from tapestream.system.limits import total_nbytes

_HOMES = {"auto": None, "device": Tier.DEVICE, "host": Tier.HOST, "disk": Tier.DISK}
_PARTS = (2, 4)


@dataclass(frozen=True, slots=True)
class ByShapes:
    """How a step is planned by shapes alone: the arguments of `stream` that count for that, and the optimizer by name,
    as the command has them."""

    device: torch.device | str | None = None
    budget: Budget | str | int | None = None
    machine: Machine | None = None
    home: str = "auto"
    folder: str | os.PathLike[str] | None = None
    planner: str = "auto"
    blocks: BlockNames | None = None
    loss_chunks: Chunks | None = None
    head: str | None = None
    tables: BlockNames | None = None
    optimizer: str = "adamw"
    update: Literal["step", "backward"] = "step"
    where: Where = "device"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ByShapes":
        """Raises InputError for an argument that has no effect where nothing runs."""
        for name in given:
            if name not in cls.__slots__:
                raise InputError(
                    f"plan: {name}= has no effect where shapes alone are planned (the model or the batch is on meta, "
                    f"or the device is elsewhere); leave it out. What counts: {', '.join(cls.__slots__)}"
                )
        return cls(**given)

    def question(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Question:
        """Whether a call fits. Raises InputError for what cannot be planned."""
        if self.home not in _HOMES:
            raise InputError(f"plan: home={self.home!r} was asked for; by shapes alone it is {', '.join(_HOMES)}")
        device, budget, samples = self._device(), Budget.of(self.budget), samples_of(args, kwargs)

        @cache
        def outlined(asked: Variant) -> Outline:
            part = first_part(args, kwargs, samples // asked.batch)
            named = [] if self.tables is None else named_modules(model, self.tables, "tables")
            return outline(
                model, *part, device=device, blocks=self.blocks, moves=asked.moves,
                loss_chunks=asked.loss_chunks, tables=[*named, *asked.tables] or None, head=self.head,
            )  # fmt: skip

        speeds = self.machine or Machine()
        return Question(
            outlined, samples, checked(self.optimizer, self.update, self.where), self.update, device,
            budget=self._allowed(budget, device), gpu=None,
            ram=None if device == "cpu" else total_nbytes() if budget.host_nbytes is None else budget.host_nbytes,
            disk=self._disk_nbytes() if budget.disk_nbytes is None else budget.disk_nbytes,
            home=_HOMES[self.home], speeds=replace(speeds, links={**usual_links(device), **speeds.links}),
            loss_chunks=self.loss_chunks, where=self.where,
        )  # fmt: skip

    def _device(self) -> str:
        kind = torch.device(self.device or default_device()).type
        if kind not in ("cpu", "cuda"):
            raise InputError(f"plan: device={kind!r} was asked for; by shapes alone it is 'cpu' or 'cuda'")
        return kind

    def _allowed(self, budget: Budget, device: str) -> int:
        if budget.device_nbytes is not None:
            return budget.device_nbytes
        if not is_present(torch.device(device)):
            raise InputError("plan: the device is elsewhere; say how much a step may take there, budget='24GiB'")
        return free_nbytes(torch.device(device))

    def _disk_nbytes(self) -> int:
        where = Path() if self.folder is None else Path(self.folder)
        if not where.is_dir():
            raise InputError(f"plan: there is no folder {str(where)!r}; create it, or give ts.Budget(..., disk='2TB')")
        return shutil.disk_usage(where).free


def is_elsewhere(device: torch.device | str | None, machine: Machine | None) -> bool:
    """Whether a GPU is meant that is not here, and a machine that has it."""
    kind = str(device).partition(":")[0]
    return machine is not None and kind == "cuda" and not is_present(torch.device(kind))


def has_only_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor of the model or of the call is on the meta device."""
    tensors = (*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs)))
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors)


def planned_by_shapes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], longest: Any, asked: ByShapes, *, suggest: bool
) -> Plan:
    """The plan of the first chain of repeated blocks, and in `Plan.step` the numbers of the whole step, as
    ``tapestream plan`` gives them. Raises as `plan`."""
    check_kinds("auto", asked.machine)
    calls: list[Arguments] = (
        [(args, kwargs)] if longest is None else [longest_of(longest, args, kwargs), (args, kwargs)]
    )
    found: list[Answer] = []
    for call in calls:
        question = asked.question(model, *call)
        try:
            found.append(question.plan(asked.planner))
        except BudgetError as error:
            which = LONGEST_CALL if len(calls) > len(found) + 1 else ""
            told = error.saying(f"{which}{error.message}")
            raise helped(told, _remedies(question) if suggest else ()) from None
    answer, sized = found[-1], [batch_of(tensors_in([call])) for call in reversed(calls)]
    paces = (Pace(*size, one.seconds) for size, one in zip(sized, reversed(found), strict=True) if size is not None)
    return replace(
        answer.chains[0],
        paces=() if longest is None else tuple(dict.fromkeys(paces)),
        step=_whole(answer),
        remedies=remedies_for(_remedies(question), answer.seconds) if suggest else (),
    )


def _whole(answer: Answer) -> WholeStep:
    peaks = {tier: answer.peak_nbytes(tier) for tier in MEMORIES}
    return WholeStep(
        answer.seconds, answer.waiting_seconds, answer.overhead, answer.forwards, answer.moved_nbytes, peaks
    )


def _remedies(question: Question) -> Iterator[Remedy]:
    """What would help, each tried."""
    for change, other, runs in _changes(question):
        try:
            answer = other.plan()
        except (BudgetError, InputError):
            continue
        yield Remedy(change, runs * answer.seconds, answer.peak_nbytes(Tier.DEVICE))


def _changes(question: Question) -> Iterator[tuple[str, Question, int]]:
    """In words, and how often it is run for the same samples."""
    chunked = question.in_chunks
    if chunked is not None:
        yield "stream(..., loss_chunks='auto')", chunked, 1
    if question.update == "step":
        yield "optimizer(..., update='backward')", replace(question, update="backward"), 1
    if question.where == "device" and question.device != "cpu" and question.home in (None, Tier.HOST):
        yield "optimizer(..., where='host')", replace(question, where="host"), 1
    for parts in _PARTS if question.update == "step" else ():
        if question.batch % parts == 0:
            smaller = replace(question, batch=question.batch // parts)
            yield f"the batch in {parts} equal parts, one after the other", smaller, parts
    for name in question.tables_to_try:
        yield f"stream(..., tables=[{name!r}])", replace(question, tables=(*question.tables, name)), 1
