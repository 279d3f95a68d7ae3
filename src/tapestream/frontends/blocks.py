"""Which modules of a model are its blocks."""

from collections.abc import Sequence

from torch import nn

from tapestream.errors import InputError


def find_blocks(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The blocks of ``model`` in order, each once: children of its ModuleLists and Sequentials, largest containers
    only.

    ``blocks`` names them instead. Raises InputError when there are none, or one lies inside another.
    """
    found = list(dict.fromkeys(blocks)) if blocks is not None else _children_of_containers(model)
    if not found:
        raise InputError(
            f"no blocks were found in {type(model).__name__}: it has no ModuleList or Sequential with two or more "
            f"children that hold "
            "parameters; name them with blocks=[...]"
        )
    members = {id(m) for m in model.modules()}
    inner: dict[int, nn.Module] = {}
    for block in found:
        if id(block) not in members:
            raise InputError(f"blocks= names a {type(block).__name__} that is not part of the model")
        for module in block.modules():
            if id(module) in inner:
                raise InputError(
                    f"blocks overlap: {type(block).__name__} and {type(inner[id(module)]).__name__} share a "
                    f"{type(module).__name__}; name disjoint blocks with blocks=[...]"
                )
            inner[id(module)] = block
    return found


def _children_of_containers(model: nn.Module) -> list[nn.Module]:
    containers: list[nn.Module] = []
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(list(module.children())) > 1:
            containers.append(module)
        else:
            waiting.extend(module.children())
    if not containers:
        return []
    sizes = [sum(p.numel() for p in c.parameters()) for c in containers]
    # A small container beside a large one (a two-layer head, say) is not worth streaming.
    return list(
        dict.fromkeys(
            child
            for container, size in zip(containers, sizes, strict=True)
            if size > 0 and 20 * size >= max(sizes)
            for child in container.children()
        )
    )
