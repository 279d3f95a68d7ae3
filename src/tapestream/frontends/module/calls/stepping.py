"""What a streamed model is doing: a call is under way; the optimizer's step, block by block."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from tapestream.executor.interpreter import Interpreter
from tapestream.frontends.module.calls.live import SegmentView
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


def run_step(handle: "Streamed") -> None:
    """The step phase of the last plan, then blocks with gradients that it does not know; every block is updated
    once. With update="backward" the latter alone, of blocks that are plain tensors."""
    with handle._live.working():
        handle._forward_only.end()
        handle.store.settle()
        handle.ranks.check_step([*handle.outside_parameters(), *handle.pinned.parameters()], handle.optimizer)
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
                    Interpreter(plan.schedule, Runner([], [], handle.device), blocks=blocks).run_step()
                handle.store.settle()
            handle.store.update_left(handle.pinned.blocks if handle.update == "backward" else None)
        finally:
            handle.store.settle()
        handle._allocator.ended()
    handle._allocator.look(handle)
