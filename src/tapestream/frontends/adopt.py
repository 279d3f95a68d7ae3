"""Getting a model ready to be streamed: which parameters move together, and making meta modules real piece by piece."""

from collections.abc import Sequence

import torch
from torch import nn

from tapestream.errors import InputError


def parameter_groups(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[list[list[int]], list[int | None]]:
    """Blocks that share parameters form one group: positions per group, and the group of each position (None: no
    parameters).

    Raises InputError for a parameter that a block shares with code outside the blocks.
    """
    inside = {id(m) for block in blocks for m in block.modules()}
    outside = {
        id(p): name
        for name, module in model.named_modules()
        if id(module) not in inside
        for p in module._parameters.values()
        if p is not None
    }
    first: dict[int, int] = {}
    leader = list(range(len(blocks)))
    for position, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if id(parameter) in outside:
                raise InputError(
                    f"parameter {name!r} of block {position} ({type(block).__name__}) is shared with "
                    f"{outside[id(parameter)] or 'the model itself'}, outside the blocks; "
                    "this is not supported yet: untie it, or name other blocks with blocks=[...]"
                )
            if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                _check_dense(name, position, parameter)
            earlier = first.setdefault(id(parameter), position)
            _join(leader, earlier, position)
    members: dict[int, list[int]] = {}
    for position, block in enumerate(blocks):
        if next(block.parameters(), None) is not None:
            members.setdefault(_find(leader, position), []).append(position)
    groups = list(members.values())
    group_of = {position: number for number, group in enumerate(groups) for position in group}
    return groups, [group_of.get(position) for position in range(len(blocks))]


def parameters_of(modules: Sequence[nn.Module]) -> tuple[nn.Parameter, ...]:
    """Parameters below ``modules``, each once, in order."""
    return tuple({id(p): p for module in modules for p in module.parameters()}.values())


def make_outside_real(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Give everything outside the blocks its bytes on ``device``, initialised if it was on meta."""
    inside = {id(m) for block in blocks for m in block.modules()}
    outside = [m for m in model.modules() if id(m) not in inside]
    from_meta = [m for m in outside if _own_meta(m)]
    ties = _ties(from_meta)
    for module in outside:
        if _own_meta(module):
            module.to_empty(device=device, recurse=False)
        else:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    _tie_again(ties)
    if from_meta:
        _initialize(model, from_meta)


def make_real(block: nn.Module, device: torch.device) -> None:
    """Give a block made on meta its bytes on ``device`` and initialise it; nothing happens to any other block."""
    from_meta = [m for m in block.modules() if _own_meta(m)]
    if not from_meta:
        return
    ties = _ties(from_meta)
    block.to_empty(device=device)
    _tie_again(ties)
    _initialize(block, from_meta)


def buffers_to(block: nn.Module, device: torch.device) -> None:
    """Buffers of a block stay on the device."""
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _initialize(owner: nn.Module, modules: Sequence[nn.Module]) -> None:
    initialize = getattr(owner, "initialize", None)
    if callable(initialize):
        initialize()
        return
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise InputError(
                f"{type(module).__name__} was made on the meta device and cannot be initialised: give "
                f"{type(owner).__name__} an "
                "initialize() method, or make the model on a real device"
            )
        reset()


Ties = list[list[tuple[nn.Module, str]]]


def _ties(modules: Sequence[nn.Module]) -> Ties:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(ties: Ties) -> None:
    for (module, name), *others in ties:
        for other, other_name in others:
            other._parameters[other_name] = module._parameters[name]


def _own_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def _check_dense(name: str, position: int, parameter: torch.Tensor) -> None:
    if parameter.layout is not torch.strided or type(parameter.data) is not torch.Tensor:
        raise InputError(
            f"parameter {name!r} of block {position} is a {type(parameter.data).__name__} of layout "
            f"{parameter.layout}; only ordinary dense "
            "tensors can be streamed"
        )


def _find(leader: list[int], position: int) -> int:
    while leader[position] != position:
        position = leader[position]
    return position


def _join(leader: list[int], one: int, other: int) -> None:
    a, b = _find(leader, one), _find(leader, other)
    leader[max(a, b)] = min(a, b)
