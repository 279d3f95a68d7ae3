"""`estimate`: what training a GPT costs, from its shape alone; nothing is allocated and nothing is run."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tapestream.costs import BlockCost, Profile, StageCost
from tapestream.errors import InputError
from tapestream.models.gpt import GPT, Block, GPTConfig
from tapestream.optim.parts import Member, part_limits, state_parts
from tapestream.optim.state import StateShape
from tapestream.storage.blocks import StatePart, divided
from tapestream.storage.layout import Layout

# Tensors of the parameter's shape that the torch optimizer of this name keeps, with its default options.
_STATE_TENSORS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd": 0}

# Multiplications and additions of a block are 2 per weight and token, and 2 s w per token for causal attention (half of
# the s x s matrix, twice). Backward does the former twice, the latter 2.5 times: flash attention recomputes the scores.
_ATTENTION_BACKWARD = 2.5


def optimizer_state_factor(optimizer: str) -> int:
    """Tensors of a parameter's shape that an optimizer keeps. Raises InputError for one that is not known."""
    if optimizer not in _STATE_TENSORS:
        raise InputError(f"optimizer {optimizer!r} was asked for; those known are {', '.join(_STATE_TENSORS)}")
    return _STATE_TENSORS[optimizer]


def estimate(
    config: GPTConfig,
    *,
    batch: int,
    sequence: int,
    flops_per_second: float,
    optimizer: str = "adamw",
    update: str = "step",
    update_bytes_per_second: float = 5e9,
    budget_nbytes: int | None = None,
    finer: bool = False,
) -> Profile:
    """The Profile of one training step of ``GPT(config)`` on ``batch`` x ``sequence`` tokens.

    One stage and one parameter block a layer; embeddings and the final norm lie outside the blocks. Bytes are those
    that `GPT` takes under PyTorch with a fused attention: parameters as `tapestream.stream` lays them out, float32
    optimizer state (and a float32 master of 16-bit parameters), saved tensors of 15 states a layer plus the statistics
    of attention and LayerNorm. Seconds are operations over ``flops_per_second``, and bytes touched by an update over
    ``update_bytes_per_second``. Real kernels reach a part of a device's peak only: give the rate that they do reach.
    ``budget_nbytes``: of the device, for which optimizer state is cut into parts (``finer``: as where a plan needs it);
    None leaves that of a layer in one.
    Raises InputError for numbers that fit no training step.
    """
    if batch < 1 or not 1 <= sequence <= config.context:
        raise InputError(
            f"estimate: batch {batch} and sequence {sequence} were asked for; the batch is at least 1 and the sequence "
            f"1 to {config.context} (the context)"
        )
    if not flops_per_second > 0 or not update_bytes_per_second > 0:
        raise InputError("estimate: flops_per_second and update_bytes_per_second must be positive")
    tokens, width, size = batch * sequence, config.width, config.dtype.itemsize
    with torch.device("meta"):
        group = list(Block(config, 0).parameters())
        (layer,) = block_costs([group], optimizer, update_bytes_per_second, budget_nbytes=budget_nbytes, finer=finer)
        outside = _outside_nbytes(config, optimizer)
    stage = _stage(config, tokens, sequence, flops_per_second)
    if update != "backward":  # gradients come one by one and are laid out in one run of bytes afterwards
        stage = replace(stage, backward_extra_nbytes=max(stage.backward_extra_nbytes, layer.gradient_nbytes))
    return Profile(
        tuple(replace(stage, block=k) for k in range(config.layers)),
        tokens * width * size,
        (layer,) * config.layers,
        outside_nbytes=outside + 2 * tokens * 8,  # and the tokens with their targets
        turn_nbytes=_turn_nbytes(config, tokens),
        turn_seconds=6 * tokens * width * config.vocabulary / flops_per_second,
    )


def block_costs(
    groups: Sequence[Sequence[Tensor]],
    optimizer: str,
    update_bytes_per_second: float,
    *,
    budget_nbytes: int | None = None,
    finer: bool = False,
) -> list[BlockCost]:
    """Bytes and seconds of groups of parameters that move together, as `tapestream.stream` lays them out."""
    members = [[_member(i, p, optimizer) for i, p in enumerate(group) if p.requires_grad] for group in groups]
    largest = max((sum(member.nbytes for member in group) for group in members), default=0)
    limits = part_limits(budget_nbytes, largest)
    limit = limits[-1 if finer else 0] if limits else None
    return [
        _block_cost(group, state_parts(known, limit), update_bytes_per_second)
        for group, known in zip(groups, members, strict=True)
    ]


def _block_cost(parameters: Sequence[Tensor], parts: Sequence[StatePart], update_bytes_per_second: float) -> BlockCost:
    trained, frozen = (
        Layout.of((parameters[i].shape, parameters[i].dtype) for i in numbers).nbytes
        for numbers in divided([p.requires_grad for p in parameters])
    )
    gradient, kept = trained if parts else 0, sum(part.nbytes for part in parts)
    return BlockCost(
        trained,
        gradient_nbytes=gradient,
        optimizer_state_nbytes=kept,
        buffers_nbytes=frozen,
        update_seconds=(2 * trained + gradient + 2 * kept) / update_bytes_per_second if parts else 0.0,
        update_extra_nbytes=max((part.extra_nbytes for part in parts), default=0),
        state_parts=tuple(part.nbytes for part in parts),
    )


def _member(number: int, parameter: Tensor, optimizer: str) -> Member:
    state = _state(parameter, optimizer)
    wide = parameter.numel() * max(parameter.dtype.itemsize, 4)  # 16-bit parameters have masters
    shape = StateShape(tuple((str(name), tuple(size), dtype) for name, (size, dtype) in enumerate(state)))
    cast = wide if parameter.dtype.itemsize == 2 else 0
    return Member(number, tuple(parameter.shape), shape, wide, cast, divisible=True)


def kept_nbytes(parameter: Tensor, optimizer: str) -> int:
    """Bytes that the optimizer keeps for one parameter outside the blocks, a master included."""
    pairs = _state(parameter, optimizer) if parameter.requires_grad else []
    return sum(shape.numel() * dtype.itemsize for shape, dtype in pairs)


def _state(parameter: Tensor, optimizer: str) -> list[tuple[torch.Size, torch.dtype]]:
    masters = 1 if parameter.dtype.itemsize == 2 else 0
    dtype = torch.float32 if masters else parameter.dtype
    return [(parameter.shape, dtype)] * (optimizer_state_factor(optimizer) + masters)


def _outside_nbytes(config: GPTConfig, optimizer: str) -> int:
    """Parameters outside the blocks with their gradients and optimizer state."""
    shell = GPT(replace(config, layers=1))
    inside = {id(p) for p in shell.blocks.parameters()}
    return sum(2 * p.nbytes + kept_nbytes(p, optimizer) for p in shell.parameters() if id(p) not in inside)


def _stage(config: GPTConfig, tokens: int, sequence: int, flops_per_second: float) -> StageCost:
    width, size = config.width, config.dtype.itemsize
    state = tokens * width * size
    linear = 2 * tokens * config.block_parameters
    attention = 2 * tokens * sequence * width
    return StageCost(
        (linear + attention) / flops_per_second,
        (2 * linear + _ATTENTION_BACKWARD * attention) / flops_per_second,
        output_nbytes=state,
        # Normed input; query, key, value; attention's output; sum; normed sum; hidden before and after GELU (4 each);
        # one number a head, and mean and deviation of two norms, per token.
        saved_nbytes=15 * state + 4 * tokens * (config.heads + 4),
        forward_extra_nbytes=8 * state,  # sum, hidden before and after GELU, less the output
        # The cotangent of the hidden layer comes first, when that of the input and 8 w^2 of gradients do not exist yet.
        backward_extra_nbytes=max(0, 3 * state - 8 * width * width * size),
    )


def _turn_nbytes(config: GPTConfig, tokens: int) -> int:
    """Final norm, logits and cross-entropy at their peak: log-probabilities, their cotangent, that of the logits."""
    wide = tokens * config.vocabulary * max(4, config.dtype.itemsize)
    return 3 * wide + 2 * tokens * config.width * config.dtype.itemsize
