"""What parameter blocks of a streamed model cost, under its optimizer."""

from typing import TYPE_CHECKING

from tapestream.accelerator.device import is_accelerator
from tapestream.costs import BlockCost
from tapestream.costs.rates import usual_rates
from tapestream.ir.actions import Tier
from tapestream.storage.blocks import ParameterBlock

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

# What an update reads and writes per second where that is not measured: speeds are given, or nothing moves. On an
# accelerator that is the order of what its memory gives: copies must not seem hidden behind updates that are short.
_UPDATE_BYTES_PER_SECOND, _ON_ACCELERATORS = 5e9, 1e12


def update_speed(handle: "Streamed") -> float:
    """Bytes that an update reads and writes per second. What hides behind updates must not be thought to for longer
    than they take."""
    moves = handle.store.home is not Tier.DEVICE
    found = handle.optimizer.bytes_per_second() if handle.timed and moves and handle.optimizer is not None else None
    return found or (_ON_ACCELERATORS if is_accelerator(handle.device) else _UPDATE_BYTES_PER_SECOND)


def block_cost(handle: "Streamed", block: ParameterBlock, speed: float) -> BlockCost:
    """Bytes and seconds of one parameter block under the handle's optimizer, updated at ``speed`` bytes per second."""
    parameters = block.layout.nbytes
    parts = tuple(part.nbytes for part in block.state_parts) if handle.update else ()
    gradient, state = parameters if block.trainable else 0, sum(parts)
    seconds = ((2 * parameters + gradient) / block.share.ranks + 2 * state) / speed
    return BlockCost(
        parameters,
        gradient_nbytes=gradient,
        optimizer_state_nbytes=state,
        buffers_nbytes=block.frozen_layout.nbytes,
        update_seconds=seconds,
        update_extra_nbytes=max((part.extra_nbytes for part in block.state_parts), default=0),
        state_parts=parts,
        host_update_seconds=_host_seconds(handle, block, seconds) if handle.where == "host" and gradient else None,
    )


def _host_seconds(handle: "Streamed", block: ParameterBlock, measured: float) -> float:
    """Of an update in RAM, at the rate that a machine was given with."""
    rate = None if handle.timed else handle.machine().rates(usual_rates(handle.device.type)).host_updates_per_second
    return measured if rate is None else sum(block.parameters[i].numel() for i in block.trained) / rate
