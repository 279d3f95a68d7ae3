"""What a streamed model is doing: a call is under way; the optimizer's step, block by block."""

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from torch import nn

from tapestream.errors import BudgetError
from tapestream.executor.interpreter import Interpreter
from tapestream.frontends.module.calls.live import SegmentView
from tapestream.frontends.module.plans.prepare import planned_again, with_costs_now
from tapestream.ir.actions import Tier
from tapestream.runner.runner import Runner

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed


@contextlib.contextmanager
def entering(handle: "Streamed", called: nn.Module) -> Iterator[None]:
    """Inside, a call is under way: the user has called ``called``."""
    before, handle.entered = handle.entered, called
    try:
        yield
    finally:
        handle.entered = before


def run_step(handle: "Streamed", *, anew: bool) -> None:
    """The step phase of the last plan (``anew``: of one made now), then blocks with gradients that it does not know;
    every block is updated once. With update="backward" the latter alone, of blocks that are plain tensors."""
    if anew:
        _plan_step(handle)
    with handle._live.working():
        handle._forward_only.end()
        handle.store.settle()
        handle.ranks.check_step(chain(handle.outside_parameters(), handle.pinned.parameters()), handle.optimizer)
        handle.store.updates.done.clear()
        handle._allocator.begins()
        prepared = handle.last
        try:
            # Where blocks are at home on the device, no plan has anything to move: all of them are left.
            if prepared is not None and prepared.update == "step" and handle.store.home is not Tier.DEVICE:
                handle.store.place(prepared.at_step)
                handle.store.copies.staying = prepared.resident
                for plan in prepared.plans:
                    blocks = SegmentView(handle.store, [])
                    with handle.store.updates.in_step():
                        Interpreter(plan.schedule, Runner([], [], handle.device), blocks=blocks).run_step()
                handle.store.settle()
            handle.store.update_left(handle.pinned.blocks if handle.update == "backward" else None)
        finally:
            handle.store.settle()
        handle._allocator.ended()
    handle._allocator.look(handle)


def _plan_step(handle: "Streamed") -> None:
    """Plan the step phase of the last call anew: the optimizer has given state a place since, of which that call's
    plans know nothing. Raises BudgetError where it does not fit."""
    while (last := handle.last) is not None:
        try:
            found = planned_again(handle, last, with_costs_now(handle, last.profiles), last.late)
        except BudgetError:
            if not handle.cut_finer():
                raise
            continue
        handle.homes.reserve(found.on_disk)
        with handle._live.working():
            handle.store.place(frozenset(), found.below_host(handle.store.copies.on_disk))
            handle.store.gradients.leave()  # home, wherever the plans of the calls that made them left them
        handle.last = found
        return
