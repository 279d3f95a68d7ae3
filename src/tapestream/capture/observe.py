"""`Observation`: one run is watched operation by operation, whatever leads to its tensors: a closure, an attribute of
an object, a weak reference, a thread's own variable. Only compiled code is not looked into.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from tapestream.capture.buffers import BufferSnapshot, buffer_slots
from tapestream.capture.cells import Cell, Contents, Version, key_of
from tapestream.capture.python_state import key_of_generator
from tapestream.capture.rebinding import LeavesCompiled, left_out

_aten: Any = torch.ops.aten

_SILENT_WRITERS: dict[Any, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    _aten.native_batch_norm.default: lambda args: (3, 4) if args[5] else (),
    _aten.cudnn_batch_norm.default: lambda args: (3, 4) if args[5] else (),
    _aten.miopen_batch_norm.default: lambda args: (3, 4) if args[5] else (),
    _aten.batch_norm_update_stats.default: lambda args: (1, 2),
    _aten.batch_norm_gather_stats.default: lambda args: (3, 4),
    _aten.batch_norm_gather_stats_with_counts.default: lambda args: (3, 4),
}
"""Operators that write into arguments without their schema saying so: which, by their arguments."""


class UnknownModules(Exception):
    """A run called ``modules`` that nobody knew. What it changed is put back, as far as it was observed."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.modules = modules


class Observation:
    """What a run did. ``cells``: memory that it wrote into, neither its arguments' nor its own; ``contents``: what was
    there before; ``generators``: random generators, other than PyTorch's own, that operations were given, with their
    states before; ``modules``: those that were called and that nobody knew; ``rebinds``: whether a tensor was set to
    what it is, which is left out (see `Rebinding`)."""

    def __init__(self) -> None:
        self.contents = Contents((), ())
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.modules: list[nn.Module] = []
        self.rebinds = False
        self._buffers: list[BufferSnapshot] = []

    def called(self, module: nn.Module) -> None:
        """One that nobody knew is about to run."""
        self.modules.append(module)
        self._buffers.append(BufferSnapshot.take(buffer_slots(list(module.modules()))))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Memory that the run wrote into."""
        return self.contents.cells

    def put_back(self) -> None:
        """Let memory, generators, and buffers and numbers of modules that nobody knew hold what they held before."""
        self.contents.put_back()
        for buffers in reversed(self._buffers):
            buffers.put_back()
        for generator, state in self.generators:
            generator.set_state(state)


@contextlib.contextmanager
def observed(
    given: Iterable[torch.Tensor], modules: Collection[nn.Module], *, calls: bool = True
) -> Iterator[Observation]:
    """Inside, the run; afterwards the Observation tells. ``given``: the run's arguments; ``modules``: those that are
    known, whose buffers somebody else looks after; ``calls``: look at calls of others, too, by a hook, for which code
    that is compiled would be so anew.

    Raises UnknownModules after a run that called others.
    """
    found, known = Observation(), {id(module) for module in modules}
    buffers = (buffer for module in modules for buffer in module._buffers.values() if buffer is not None)
    mode = _Operations(found, (*given, *buffers))

    def called(module: nn.Module, _: Any) -> None:
        if id(module) not in known:
            known.update(map(id, module.modules()))
            found.called(module)

    handle = register_module_forward_pre_hook(called) if calls else None
    try:
        with mode:
            yield found
    finally:
        if handle is not None:
            handle.remove()
        found.contents = mode.written()
    if found.modules:
        found.put_back()
        raise UnknownModules(found.modules)


class _Operations(LeavesCompiled):
    """Sees each operation before its kernel runs."""

    def __init__(self, found: Observation, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._known: set[int | None] = {None, *map(key_of, known)}
        self._written: dict[int, tuple[Cell, torch.Tensor]] = {}
        self._versions: list[Version] = []
        self._drawn = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if left_out(func, args):
            self._found.rebinds = True
            return args[0]
        kwargs, kind = kwargs or {}, _kind_of(func)
        if kind.writes:
            for leaf in pytree.tree_leaves(written_by(func, args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._note(leaf)
        if kind.draws:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Generator) and key_of_generator(leaf) not in self._drawn:
                    self._drawn.add(key_of_generator(leaf))
                    self._found.generators.append((leaf, leaf.get_state()))
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            key = None if kind.aliases else key_of(result)
            if key not in self._known and key not in [key_of(one) for one in args if isinstance(one, torch.Tensor)]:
                self._known.add(key)
        elif result is not None:
            self._made(args, kwargs, result)
        return result

    def _made(self, args: Any, kwargs: Any, result: Any) -> None:
        """Results that are no views of what the operation was given."""
        shown = {key_of(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = {key_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        self._known |= made - shown

    def _note(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key is None or key in self._known:
            return
        if key not in self._written:
            cell = Cell(tensor.untyped_storage())
            cell.add(tensor)
            self._written[key] = cell, cell.read()
            self._versions += cell.versions()
        else:
            self._written[key][0].add(tensor)

    def written(self) -> Contents:
        """What was there before, of memory that lives on."""
        there = [(cell, before) for cell, before in self._written.values() if cell.alive]
        return Contents(tuple(cell for cell, _ in there), tuple(before for _, before in there), self._versions)


class _Kind(NamedTuple):
    """Of an operator: whether it writes; places and names of arguments that its schema says it writes into; whether it
    may be given a generator; whether its results may be views."""

    writes: bool
    places: tuple[int, ...]
    names: tuple[str, ...]
    draws: bool
    aliases: bool


@lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [(k, one.name) for k, one in enumerate(arguments) if one.alias_info and one.alias_info.is_write]
    return _Kind(
        bool(written) or func in _SILENT_WRITERS,
        tuple(k for k, _ in written),
        tuple(name for _, name in written),
        any("Generator" in str(one.type) for one in arguments),
        any(one.alias_info is not None for one in returns) or torch.Tag.maybe_aliasing_or_mutating in func.tags,
    )


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments of an operator, tensors or lists of them, that it writes into: by its schema, or as is known of it."""
    kind = _kind_of(func)
    silent = _SILENT_WRITERS.get(func)
    places = kind.places if silent is None else (*kind.places, *silent(args))
    return [*(args[place] for place in places if place < len(args)), *(kwargs.get(name) for name in kind.names)]
