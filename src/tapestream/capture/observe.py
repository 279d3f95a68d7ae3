"""`Observation`: one run is watched operation by operation, whatever leads to its tensors: a closure, an attribute of
an object, a weak reference, a thread's own variable. Only compiled code is not looked into.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.capture.buffers import BufferSnapshot, buffer_slots
from tapestream.capture.cells import Cell, Contents, Version, key_of
from tapestream.capture.python_state import key_of_generator

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
    states before; ``modules``: those that were called and that nobody knew."""

    def __init__(self) -> None:
        self.contents = Contents((), ())
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self.modules: list[nn.Module] = []
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
    given: Iterable[torch.Tensor], modules: Collection[nn.Module], *, compiled: bool = False
) -> Iterator[Observation]:
    """Inside, the run; afterwards the Observation tells. ``given``: the run's arguments; ``modules``: those that are
    known, whose buffers somebody else looks after; ``compiled``: some are compiled, and would be anew for a hook.

    Raises UnknownModules after a run that called others.
    """
    found, known = Observation(), {id(module) for module in modules}
    buffers = (buffer for module in modules for buffer in module._buffers.values() if buffer is not None)
    mode = _Operations(found, (*given, *buffers))

    def called(module: nn.Module, _: Any) -> None:
        if id(module) not in known:
            known.update(map(id, module.modules()))
            found.called(module)

    handle = None if compiled else register_module_forward_pre_hook(called)
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


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each operation before its kernel runs."""

    def __init__(self, found: Observation, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found
        self._known = {key for t in known if (key := key_of(t)) is not None}
        self._written: dict[int, tuple[Cell, torch.Tensor]] = {}
        self._versions: list[Version] = []
        self._drawn = set[int]()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written_by(func, args, kwargs):
            self._note(tensor)
        leaves = pytree.tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Generator) and key_of_generator(leaf) not in self._drawn:
                self._drawn.add(key_of_generator(leaf))
                self._found.generators.append((leaf, leaf.get_state()))
        result = func(*args, **kwargs)
        shown = {key_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        made = (key_of(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self._known.update(key for key in made if key is not None and key not in shown)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        key = key_of(tensor)
        if key is None or key in self._known:
            return
        if key not in self._written:
            cell = Cell(tensor.untyped_storage())
            cell.add(tensor)
            self._written[key] = cell, cell.read()
            self._versions += cell.versions()
        self._written[key][0].add(tensor)

    def written(self) -> Contents:
        """What was there before, of memory that lives on."""
        there = [(cell, before) for cell, before in self._written.values() if cell.alive]
        return Contents(tuple(cell for cell, _ in there), tuple(before for _, before in there), self._versions)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    places, names = _writes(func)
    silent = _SILENT_WRITERS.get(func)
    places = places if silent is None else (*places, *silent(args))
    found = [*(args[place] for place in places if place < len(args)), *(kwargs.get(name) for name in names)]
    for leaf in pytree.tree_leaves(found):
        if isinstance(leaf, torch.Tensor):
            yield leaf


@lru_cache(maxsize=4096)
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places and names of the arguments that an operator's schema says it writes into."""
    arguments = enumerate(func._schema.arguments)
    written = [(k, one.name) for k, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return tuple(k for k, _ in written), tuple(name for _, name in written)
