"""Getting a model ready to be streamed: which parameters move together, and which cannot be moved."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from tapestream.errors import InputError


def parameter_groups(
    model: nn.Module, blocks: Sequence[nn.Module], wide: Sequence[nn.Module] = ()
) -> tuple[list[list[int]], list[int | None]]:
    """Blocks that share parameters form one group: positions per group, and the group of each position (None: no
    parameters). ``wide``: modules that come after the blocks.

    Raises InputError for a parameter that a block shares with code outside of both, and where another streamed model
    has one. What ``wide`` modules share with
    other modules is looked at when these are called.
    """
    _check_free(model)
    blocks, ordinary = [*blocks, *wide], len(blocks)
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
            if id(parameter) in outside and position < ordinary:
                raise InputError(
                    f"parameter {name!r} of block {position} ({type(block).__name__}) is shared with "
                    f"{outside[id(parameter)] or 'the model itself'}, outside the blocks; "
                    "this is not supported yet: untie it, or name other blocks with blocks=[...]"
                )
            check_movable(f"parameter {name!r} of block {position}", parameter)
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


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Let it be known that a streamed model has these: its store is the only one that may move their bytes."""
    for parameter in parameters:
        parameter._tapestream_id = id(parameter)  # type: ignore[attr-defined]  # of a copy it would be another's


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `mark`."""
    for parameter in parameters:
        del parameter._tapestream_id  # type: ignore[attr-defined]


def _check_free(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_tapestream_id", None) == id(parameter):
            raise InputError(
                f"parameter {name!r} belongs to another streamed model: call tapestream.unstream(...) on that first, "
                "or give this one a copy (nn.Parameter(p.detach().clone()))"
            )


def check_movable(what: str, parameter: torch.Tensor) -> None:
    """Streaming moves a parameter's bytes: raise InputError if there is more to it."""
    where = f"{what} is a {type(parameter).__name__}"
    if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
        kind = type(parameter if type(parameter) is not nn.Parameter else parameter.data)
        raise InputError(
            f"{where} ({kind.__module__}.{kind.__qualname__}), which holds more than its own dense bytes, as quantised "
            "weights do (bitsandbytes, torchao); these cannot be streamed: load the model without quantisation, in "
            "bfloat16 say, or name other blocks with blocks=[...]"
        )
    if parameter.layout is not torch.strided:
        raise InputError(f"{where} of layout {parameter.layout}; only dense tensors can be streamed: use to_dense()")
    if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        raise InputError(f"{where} whose elements share bytes (it was expanded); make it contiguous() first")


def check_own_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise InputError where a block's parameter shares bytes with another tensor of the model.

    Brought home, the two would part: what is written to one would not be seen by the other any more.
    """
    inside = {id(p) for block in blocks for p in block.parameters()}
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and tensor.numel() and tensor.layout is torch.strided:
            reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            first = tensor.data_ptr()
            spans.append((str(tensor.device), first, first + reach * tensor.itemsize, name, id(tensor) in inside))
    spans.sort()
    last: dict[bool, tuple[str, int, int, str, bool]] = {}  # of those inside and outside, the one that ends last
    for span in spans:
        device, first, end, name, mine = span
        for one in last.values():
            if (mine or one[4]) and one[0] == device and first < one[2]:
                raise InputError(
                    f"{one[3]!r} and {name!r} are different tensors over the same bytes, which streaming would "
                    "separate; make them one Parameter (a.weight = b.weight) of two blocks, or clone() one of them"
                )
        if mine not in last or last[mine][0] != device or last[mine][2] < end:
            last[mine] = span


def _find(leader: list[int], position: int) -> int:
    while leader[position] != position:
        position = leader[position]
    return position


def _join(leader: list[int], one: int, other: int) -> None:
    a, b = _find(leader, one), _find(leader, other)
    leader[max(a, b)] = min(a, b)
