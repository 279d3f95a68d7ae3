"""What a parameter block costs, under an optimizer or none."""

from tapestream.costs import BlockCost
from tapestream.storage.blocks import ParameterBlock


def block_cost(
    block: ParameterBlock,
    bytes_per_second: float,
    *,
    updated: bool,
    hosted_bytes_per_second: float | None,
    numbers_per_second: float | None,
) -> BlockCost:
    """Bytes and seconds: an update reads and writes at that speed, or, where blocks are updated in RAM, at the other;
    or goes over so many numbers of parameters there, where that is known."""
    parameters = block.layout.nbytes
    parts = tuple(part.nbytes for part in block.state_parts) if updated else ()
    gradient, state = parameters if block.trainable else 0, sum(parts)
    touched = (2 * parameters + gradient) / block.share.ranks + 2 * state
    on_host = None if hosted_bytes_per_second is None else touched / hosted_bytes_per_second
    if on_host is not None and numbers_per_second is not None:
        on_host = sum(block.parameters[i].numel() for i in block.trained) / numbers_per_second
    return BlockCost(
        parameters,
        gradient_nbytes=gradient,
        optimizer_state_nbytes=state,
        buffers_nbytes=block.frozen_layout.nbytes,
        update_seconds=touched / bytes_per_second,
        update_extra_nbytes=max((part.extra_nbytes for part in block.state_parts), default=0),
        state_parts=parts,
        host_update_seconds=on_host if gradient else None,
    )
