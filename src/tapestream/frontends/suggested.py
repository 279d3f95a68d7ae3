"""What would help a step that was planned: each remedy is planned as the step itself was."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from tapestream.errors import BudgetError
from tapestream.frontends.module.calls.refused import first_part, samples_of
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.streamed import Streamed
from tapestream.planning.remedy import Remedy

_GAIN = 0.99  # of the seconds: less is no remedy
_PARTS = (2, 4)


def tried_with(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Remedy]:
    """What can be changed of a model that is streamed, each planned for a call with these arguments."""
    return [one for change, plan, runs in _changes(handle, args, kwargs) for one in tried(change, plan, runs)]


def tried(change: str, plan: Callable[[], Prepared], runs: int = 1) -> Iterator[Remedy]:
    """One change, if what ``plan`` gives with it fits; it takes so many runs for the same samples."""
    with suppress(Exception):  # a model may refuse a smaller batch in words of its own, as BatchNorm does
        found = plan()
        yield Remedy(change, runs * seconds_of(found), max(plan.peak_nbytes for plan in found.plans))


def that_help(remedies: Iterable[Remedy], seconds: float) -> tuple[Remedy, ...]:
    """Those that save more than 1% of ``seconds``, the fastest first."""
    faster = (replace(one, before_seconds=seconds) for one in remedies if one.seconds < _GAIN * seconds)
    return tuple(sorted(faster, key=lambda one: one.seconds))


def seconds_of(found: Prepared) -> float:
    """Of a step, with all its chains."""
    return sum(plan.seconds for plan in found.plans)


def helped(error: BudgetError, remedies: Iterable[Remedy]) -> BudgetError:
    """``error``, with what fits."""
    known = that_help(remedies, inf)
    return error.saying(f"{error.message}. It fits with {'; with '.join(map(str, known))}") if known else error


def _changes(
    handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], Prepared], int]]:
    if handle.update == "step":
        yield "optimizer(..., update='backward')", partial(_in_backward, handle, args, kwargs), 1
    for parts in _PARTS if handle.update != "backward" else ():  # where each part would be a step
        if samples_of(args, kwargs) % parts == 0:
            part = partial(handle.prepare_for, *first_part(args, kwargs, parts))
            yield f"the batch in {parts} equal parts, one after the other", part, parts


def _in_backward(handle: Streamed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Prepared:
    update, handle.update = handle.update, "backward"
    try:
        return handle.prepare_for(args, kwargs)
    finally:
        handle.update = update
