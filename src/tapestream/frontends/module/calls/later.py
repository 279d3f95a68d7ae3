"""Functions that read the weight of a block run as calls of that block, be it after the model has returned."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tapestream.frontends.module.calls.call import StreamCall
from tapestream.frontends.module.calls.node import apply_block
from tapestream.runner.graph import root_of_graph
from tapestream.runner.guards import Guard

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

Within = Callable[..., torch.Tensor]
"""Takes a function and its tensors."""


def calling(handle: "Streamed", module: nn.Module) -> Callable[[], Within] | None:
    """Where ``module`` is a block: what gives, in a call of the model, that which runs functions as calls of the block.

    None for other modules.
    """
    position = next((p for p, block in enumerate(handle.blocks) if block is module), None)
    return None if position is None else lambda: functools.partial(_call, handle, position, handle.call)


def _call(
    handle: "Streamed",
    position: int,
    call: StreamCall | None,
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
) -> torch.Tensor:
    """``function`` as a call of a block in ``call`` of the model.

    After that, where the plan has no such call left, what it makes has no gradient: asking for one raises
    GradientError.
    """
    if call is handle.call:  # under way, or both None in an observed one
        found: torch.Tensor = handle.call_block(position, function, args, {})
        return found
    with handle._live.working(), torch.enable_grad():
        if call is not None and not call.closed and call.order.has_place(position):
            found = apply_block(call, position, function, args, {})
            call.end_forward()
            return found
        with torch.no_grad():
            made = handle.call_block(position, function, args, {})
        root, name = root_of_graph(), f"block {position}, called after the model's own call,"
        found = Guard.apply(root, made, name)  # type: ignore[no-untyped-call]
        return found
