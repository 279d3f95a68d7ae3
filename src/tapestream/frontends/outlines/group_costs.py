"""What groups of parameters cost that move together, with the state of their optimizer, before any exist."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tapestream.costs import BlockCost
from tapestream.frontends.outlines.optimizers import refused, state_of
from tapestream.optim.parts import Member, part_limits, state_parts
from tapestream.optim.rule import MASTER
from tapestream.optim.state import StateShape
from tapestream.storage.blocks import StatePart, divided
from tapestream.storage.layout import Layout, unit_nbytes
from tapestream.storage.transfer import round_up


def block_costs(
    groups: Sequence[Sequence[Tensor]],
    optimizer: str,
    update_bytes_per_second: float,
    *,
    budget_nbytes: int | None = None,
    passed_nbytes: int | None = None,
    finer: bool = False,
    moves: bool = True,
    shards: int = 1,
    host_updates_per_second: float | None = None,
) -> list[BlockCost]:
    """Bytes and seconds of groups of parameters that move together, as `tapestream.stream` lays them out; ``moves``:
    whether they leave the device. ``budget_nbytes``, ``passed_nbytes``: see `part_limits`. ``shards``: ranks among
    which they are divided, each with the state of its part. ``host_updates_per_second``: see `Rates`."""
    different = {id(group): group for group in groups}  # equal blocks of one outline are one
    members = {
        key: [_member(i, p, optimizer) for i, p in enumerate(group) if p.requires_grad]
        for key, group in different.items()
    }
    largest = max((sum(member.nbytes for member in group) for group in members.values()), default=0)
    limits = part_limits(budget_nbytes, -(-largest // shards), passed_nbytes)
    limit = shards * limits[-1 if finer else 0] if limits else None
    unit = unit_nbytes(moves=moves)
    costs = {
        key: _block_cost(different[key], state_parts(known, limit), update_bytes_per_second, unit, shards)
        for key, known in members.items()
    }
    if host_updates_per_second is not None:
        for key, cost in costs.items():
            trained = sum(p.numel() for p in different[key] if p.requires_grad) / shards
            costs[key] = replace(cost, host_update_seconds=trained / host_updates_per_second) if trained else cost
    return [costs[id(group)] for group in groups]


def _block_cost(
    parameters: Sequence[Tensor], parts: Sequence[StatePart], update_bytes_per_second: float, unit: int, shards: int
) -> BlockCost:
    trained, frozen = (
        Layout.of(((parameters[i].shape, parameters[i].dtype) for i in numbers), unit * shards).nbytes
        for numbers in divided([p.requires_grad for p in parameters])
    )
    sizes = tuple(round_up(-(-part.nbytes // shards)) for part in parts)
    gradient, kept = trained if parts else 0, sum(sizes)
    return BlockCost(
        trained,
        gradient_nbytes=gradient,
        optimizer_state_nbytes=kept,
        buffers_nbytes=frozen,
        update_seconds=((2 * trained + gradient) / shards + 2 * kept) / update_bytes_per_second if parts else 0.0,
        update_extra_nbytes=max((-(-part.extra_nbytes // shards) for part in parts), default=0),
        state_parts=sizes,
    )


def _member(number: int, parameter: Tensor, optimizer: str) -> Member:
    shape, divisible = _state(parameter, optimizer)
    wide = parameter.numel() * max(parameter.dtype.itemsize, 4)  # 16-bit parameters have masters
    cast = wide if parameter.dtype.itemsize == 2 else 0
    return Member(number, tuple(parameter.shape), shape, wide, cast, divisible=divisible)


def kept_nbytes(parameter: Tensor, optimizer: str) -> int:
    """Bytes that the optimizer keeps for one parameter outside the blocks, a master included."""
    return _state(parameter, optimizer)[0].nbytes if parameter.requires_grad else 0


def staying_nbytes(parameter: Tensor, optimizer: str) -> int:
    """Bytes that it keeps for one parameter which stay on the device, wherever that is."""
    return _state(parameter, optimizer)[0].beside_nbytes if parameter.requires_grad else 0


def _state(parameter: Tensor, optimizer: str) -> tuple[StateShape, bool]:
    """Of one parameter, with a master where it has 16 bits, and whether its elements may be updated apart."""
    shape, masters = tuple(parameter.shape), parameter.dtype.itemsize == 2 and refused(optimizer) is None
    found, divisible = state_of(optimizer, shape, torch.float32 if masters else parameter.dtype)
    master = ((MASTER, shape, torch.float32),) if masters else ()
    return replace(found, tensors=(*found.tensors, *master)), divisible
