"""What would help a step that was planned: each remedy is planned as the step itself was."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, TypeAlias

from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.gathering import after_a_backward
from tapestream.frontends.module.calls.refused import first_part, samples_of
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.streamed import Streamed
from tapestream.planning.plan import Plan
from tapestream.planning.remedy import Remedy, that_help

Runs: TypeAlias = Sequence[Plan]
"""The plans of all chains of all runs that make one step."""
PARTS = (2, 4)
"""Into how many a batch is cut."""


def tried_with(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any], base: Prepared | None) -> list[Remedy]:
    """What can be changed of a model that is streamed, each planned for a call with these arguments; ``base``: without
    it, None where that does not fit."""
    plans = None if base is None else base.plans
    return [one for change, plan in _changes(handle, args, kwargs) for one in tried(change, plan, plans)]


def tried(change: str, plan: Callable[[], Runs], base: Runs | None) -> Iterator[Remedy]:
    """One change, if what ``plan`` gives with it fits; ``base``: without it, None where that does not fit.

    Profiles are measured, each at another moment: what is lost beside everything stored counts, and the time itself
    only where that is longer, so that a quicker moment is no remedy. Waiting for copies takes as long at any moment.
    """
    with suppress(Exception):  # a model may refuse a smaller batch in words of its own, as BatchNorm does
        runs = plan()
        seconds, stored = sum(one.seconds for one in runs), sum(one.stored_seconds for one in runs)
        if base is not None and stored:
            waits = sum(one.simulation.stall_seconds for one in runs)
            then = sum(one.stored_seconds for one in base)
            seconds = max(seconds, waits + (seconds - waits) * then / stored)
        yield Remedy(change, seconds, max(one.peak_nbytes for one in runs))


def remedies_for(tries: Iterable[Remedy], seconds: float) -> tuple[Remedy, ...]:
    """Those that help a step of so many ``seconds``, which they are compared with."""
    return tuple(replace(one, before_seconds=seconds) for one in that_help(tries, seconds))


def seconds_of(found: Prepared) -> float:
    """Of a step, with all its chains."""
    return sum(plan.seconds for plan in found.plans)


def helped(error: BudgetError, remedies: Iterable[Remedy]) -> BudgetError:
    """``error``, with what fits."""
    known = remedies_for(remedies, inf)
    return error.saying(f"{error.message}. It fits with {'; with '.join(map(str, known))}") if known else error


def head_of(model: nn.Module, blocks: Sequence[nn.Module]) -> str | None:
    """The name of the layer that makes the logits where the model does not say it: its only linear one outside
    ``blocks``. None where nobody need or can say it."""
    if callable(getattr(model, "get_output_embeddings", None)):
        return None
    inside = {id(module) for block in blocks for module in block.modules()}
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) not in inside
    ]
    return names[0] if len(names) == 1 else None


def _changes(
    handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Runs]]]:
    if handle.update == "step":
        yield "optimizer(..., update='backward')", partial(_in_backward, handle, args, kwargs)
    for parts in PARTS if handle.update != "backward" else ():  # where each part would be a step
        if samples_of(args, kwargs) % parts == 0:
            yield f"the batch in {parts} equal parts, one after the other", partial(_cut, handle, args, kwargs, parts)


def _in_backward(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runs:
    update, handle.update = handle.update, "backward"
    try:
        return handle.prepare_for(args, kwargs).plans
    finally:
        handle.update = update


def _cut(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Runs:
    """The first of the parts, and those after it beside its gradients."""
    first = handle.prepare_for(*first_part(args, kwargs, parts))
    return [*first.plans, *after_a_backward(handle, first, {}).plans * (parts - 1)]
