"""Which modules of a model are its blocks."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import nn

from tapestream.errors import InputError

BlockNames: TypeAlias = Sequence[nn.Module | type[nn.Module] | str] | type[nn.Module] | str
"""Modules, classes, or names of either."""


def find_blocks(model: nn.Module, blocks: BlockNames | None = None) -> list[nn.Module]:
    """The blocks of ``model`` in order, each once.

    None: the repeated children of its largest ModuleLists and Sequentials (where there are none, of ModuleDicts of one
    class); where the children of one differ in shape (the stages of a vision model), the repeated children inside
    these; where they are lists themselves, which nobody calls, what is in them; where no list has two, that of one
    (a layer that is called again and again). ``blocks`` names them instead: modules,
    classes or class names (every instance), or names as in ``named_modules()`` (of a block, or of a container of
    blocks). Blocks may share modules without parameters and buffers (an activation). Raises InputError when there are
    none, or one lies inside another.
    """
    if blocks is None:
        found = repeated_children(model)
    else:
        found = named_modules(model, blocks)
    if not found:
        raise InputError(
            f"no blocks were found in {type(model).__name__}: it has no ModuleList or Sequential whose children hold "
            "parameters, and no ModuleDict of such children of one class; name them with blocks=[...]"
        )
    members = {id(m) for m in model.modules()}
    inner: dict[int, nn.Module] = {}
    for block in found:
        if id(block) not in members:
            raise InputError(f"blocks= names a {type(block).__name__} that is not part of the model")
        for module in block.modules():
            if id(module) in inner and (module is block or module._parameters or module._buffers):
                one, other = type(block).__name__, type(inner[id(module)]).__name__
                if module is block or module in found:
                    raise InputError(
                        f"blocks overlap: a {one} lies inside a {other}; name disjoint blocks with blocks=[...]"
                    )
                raise InputError(
                    f"blocks overlap: {one} and {other} share a {type(module).__name__}, whose tensors would have to "
                    "move with both; give each its own (adapters: LoRA has some for each layer, VeRA and VB-LoRA share "
                    "theirs), or name disjoint blocks with blocks=[...]"
                )
            inner[id(module)] = block
    return found


def named_modules(model: nn.Module, names: BlockNames, argument: str = "blocks") -> list[nn.Module]:
    """The modules that ``names``, the value of ``argument``, names, each once. Raises InputError for other names."""
    named = [names] if isinstance(names, (type, str)) or not isinstance(names, Iterable) else names
    return list(dict.fromkeys(module for name in named for module in _named(model, name, argument)))


def parts_around(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules inside ``model`` that hold some of ``blocks`` and can be called themselves."""
    inside = {id(module) for block in blocks for module in block.modules()}
    own = set(map(id, blocks))
    around = [module for module in model.modules() if module is not model and id(module) not in inside]
    return [module for module in around if not _is_list(module) and any(id(one) in own for one in module.modules())]


def _named(model: nn.Module, name: nn.Module | type[nn.Module] | str, argument: str) -> list[nn.Module]:
    if isinstance(name, nn.Module):
        return [name]
    if not isinstance(name, (str, type)):
        raise InputError(
            f"{argument}= names {name!r}, of type {type(name).__name__}; give modules, their classes, or names of "
            f"either: {argument}=['layers'], or list(model.layers)[:3] for the first three"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(name, str) and name in modules:
        module = modules[name]
        return list(_callable(module)) if _is_container(module) or _is_list(module) else [module]
    found = [m for m in model.modules() if (type(m).__name__ == name if isinstance(name, str) else isinstance(m, name))]
    if not found:
        asked = name if isinstance(name, str) else name.__name__
        classes = ", ".join(sorted({type(m).__name__ for m in modules.values()})[:12])
        raise InputError(
            f"{argument}= names {asked!r}, but {type(model).__name__} has no module or class of that name; its classes "
            f"are {classes}, and names are those of named_modules()"
        )
    return found


def _is_container(module: nn.Module, least: int = 2) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(list(module.children())) >= least


def _is_uniform(module: nn.Module) -> bool:
    """Whether it is a ModuleDict of two or more modules of one class: most hold an embedding, a list and a head."""
    kinds = [type(child) for child in module.children()]
    return isinstance(module, nn.ModuleDict) and len(kinds) >= 2 and len(set(kinds)) == 1


def _is_list(module: nn.Module) -> bool:
    """Whether it cannot be called itself."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _callable(container: nn.Module) -> Iterator[nn.Module]:
    """The children of a container; in place of a list among them, what is in it."""
    for child in container.children():
        if _is_list(child):
            yield from _callable(child)
        else:
            yield child


def _containers(module: nn.Module, least: int = 2) -> Iterator[nn.Module]:
    """The outermost containers of ``least`` children or more within ``module``, itself included."""
    waiting = [module]
    while waiting:
        module = waiting.pop(0)
        if _is_container(module, least):
            yield module
        else:
            waiting.extend(module.children())


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def kind_of(module: nn.Module) -> object:
    """What repeated modules have in common: their class and the shapes of their parameters."""
    return type(module), tuple(p.shape for p in module.parameters())


def _alike(container: nn.Module) -> bool:
    """Most children are like another of them in class and shapes, or there are no more than two, of one class."""
    children = list(container.children())
    if len(children) <= 2 and len(set(map(type, children))) == 1:
        return True
    kinds = Counter(map(kind_of, children))
    return 2 * sum(count for count in kinds.values() if count > 1) >= len(children)


def _opened(container: nn.Module) -> list[nn.Module]:
    """``container``, or, where its children are stages that differ and are made of containers, those."""
    if _alike(container):
        return [container]
    inside = [inner for child in container.children() for inner in _containers(child, least=1)]
    repeated = [inner for inner in inside if _alike(inner)]
    return repeated if 2 * sum(map(_size, repeated)) >= _size(container) else [container]


def repeated_children(model: nn.Module) -> list[nn.Module]:
    """What `find_blocks` finds where none are named; none is no error."""
    containers = [opened for container in _containers(model) for opened in _opened(container)]
    if not containers:
        containers = [module for module in model.modules() if _is_uniform(module)][:1]
    if not containers:
        containers = [one for one in _containers(model, least=1) if _size(one)]
    if not containers:
        return []
    largest = max(containers, key=_size)
    if _alike(largest):  # beside it, the parts of a patch embedding or a head are none
        containers = [one for one in containers if _alike(one) or len(set(map(type, one.children()))) == 1]
    kinds = {type(child) for child in largest.children()}
    # A small container beside a large one (a two-layer head, say) is not worth streaming, unless it holds the same
    # kind of blocks: the first stage of a vision model has few parameters and most of the tape.
    found = dict.fromkeys(
        child
        for container in containers
        if _size(container) > 0
        and (20 * _size(container) >= _size(largest) or {type(child) for child in container.children()} <= kinds)
        for child in _callable(container)
    )
    # One that holds another is a second way to reach it: stages beside a list of all that is in them.
    return [block for block in found if not any(part in found for part in block.modules() if part is not block)]
