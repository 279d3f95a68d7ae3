"""`Stage`: one callable of a chain, with the parameters, modules and buffers that it can reach."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from tapestream.capture.buffers import BufferSnapshot, Slot, buffer_slots
from tapestream.capture.cells import Cell
from tapestream.capture.python_state import modules_behind
from tapestream.errors import InputError
from tapestream.runner.stills import Stills
from tapestream.runner.unneeded import End


@dataclass(frozen=True, slots=True)
class Traits:
    """What profiling found about one stage under one setting of shapes, modes and autocast.

    ``mutates``: input tensors that it changes in place; ``dense``: those of them whose cotangents leave it contiguous,
    as they are views in plain PyTorch. ``buffers``: buffers that it writes. ``draws_host``: it may draw from Python's
    or NumPy's generator; ``generators``: those that are objects of its own, from which it draws. ``cells``: what it
    writes into besides arguments and buffers of its modules. ``calls_autograd``: it
    differentiates inside itself, so its tape must live until it ends. ``plain_forward``: running it under ``no_grad``
    gave the same bits. ``casts_twice``: under autocast it casts one weight for several uses; ``casts``: ids of leaves
    of which it uses nothing but casts; ``uncast``: ids of leaves that it uses as they are. ``requires``: which output
    tensors carry a gradient. ``end``: what follows its last saved tensor, where recomputes may leave that out.
    ``leaves``: tensors that get a gradient from it; ``makes_leaves``: its graph ends at others too, made inside and
    gone with it; ``repeated``: ids of those that it uses more than once; ``inputs_repeated``: input tensors of which
    it does so; ``others``: those that belong to no block of
    a streamed model, whose gradients go straight to the user. ``reads``: it takes numbers out of tensors other than by
    an operation. ``rebinds``: it sets tensors to what they are. ``saves``: how many tensors it saves for its backward;
    ``nodes``: of its graph. ``left``: bytes of tensors that it leaves in attributes, by where; ``left_graph``: bytes
    that graphs of these hold after the backward. ``behind_nbytes``: see `stage_costs.with_behind`.
    """

    mutates: frozenset[int] = frozenset()
    dense: frozenset[int] = frozenset()
    buffers: tuple[Slot, ...] = ()
    draws_host: bool = True
    generators: tuple[Any, ...] = ()
    cells: tuple[Cell, ...] = ()
    calls_autograd: bool = False
    plain_forward: bool = False
    casts_twice: bool = True
    casts: frozenset[int] = frozenset()
    uncast: frozenset[int] = frozenset()
    makes_leaves: bool = False
    reads: bool = False
    rebinds: bool = False
    repeated: frozenset[int] = frozenset()
    inputs_repeated: frozenset[int] = frozenset()
    others: tuple[torch.Tensor, ...] = ()
    saves: int = 0
    nodes: int = 0
    left: tuple[tuple[tuple[int, str], int], ...] = ()
    left_graph: int = 0
    behind_nbytes: int = 0
    requires: tuple[bool, ...] | None = None
    leaves: tuple[torch.Tensor, ...] = ()
    end: End | None = None


def left_nbytes(traits: Sequence[Traits]) -> int:
    """What runs of stages leave: in attributes (of those that leave it in one place, the most), and copies of buffers
    that they write."""
    found: dict[tuple[int, str], int] = {}
    graphs: dict[int, int] = {}
    for trait in traits:
        for place, nbytes in trait.left:
            found[place] = max(nbytes, found.get(place, 0))
        for (holder, _), _ in trait.left[:1]:
            graphs[holder] = max(trait.left_graph, graphs.get(holder, 0))
    copies = sum(BufferSnapshot.nbytes_for_recomputes(trait.buffers) for trait in traits)
    return sum(found.values()) + sum(graphs.values()) + copies


class Stage:
    """Stage ``index`` of a chain: a module or any callable from state to state."""

    __slots__ = ("_own", "function", "index", "modules", "name", "stills")

    def __init__(self, index: int, function: Callable[[Any], Any]) -> None:
        if not callable(function):
            raise InputError(f"stage {index} must be a module or function, found {type(function).__name__}")
        self.index = index
        self.function = function
        self.modules = self._own = tuple(modules_behind(function))
        self.stills = Stills(self.modules)
        label = type(function).__name__
        if not isinstance(function, nn.Module):
            label = getattr(function, "__name__", label)
        self.name = f"stage {index} ({label})"

    def reaches(self, modules: Sequence[nn.Module]) -> None:
        """It calls these, too. What gets gradients of theirs is in the graph of its runs."""
        below = dict.fromkeys(found for module in modules for found in modules_below(module))
        self.modules = tuple(dict.fromkeys((*self.modules, *below)))
        self.stills = Stills(self.modules, self.stills.threaded)

    @property
    def parts(self) -> "tuple[Stage, ...]":
        """The stages that it runs, in order: itself (see `Fused`)."""
        return (self,)

    def calling(self, function: Callable[[Any], Any]) -> "Stage":
        """The same stage with another callable, for one call with arguments of its own."""
        other = object.__new__(Stage)
        other.index, other.modules, other.name, other.function = self.index, self.modules, self.name, function
        other.stills, other._own = self.stills, self._own
        return other

    def learning(self) -> Iterator[bool]:
        """Whether to look at calls of modules that it does not know, try by try. Those that are new each time, a run
        makes itself: in the last try nobody looks, and none of them is held."""
        modules, looks = self.modules, not self.is_compiled()
        yield looks
        yield looks
        self.modules, self.stills = modules, Stills(modules, self.stills.threaded)
        yield False

    def is_compiled(self) -> bool:
        """Whether any of it is compiled code."""
        return any(map(is_compiled, self.modules)) or hasattr(self.function, "_torchdynamo_orig_callable")

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the stage can reach, each once."""
        found = {id(p): p for m in self._own for p in m._parameters.values() if p is not None}
        return list(found.values())

    def buffer_slots(self) -> tuple[Slot, ...]:
        """Buffers that the stage can reach."""
        return buffer_slots(self.modules)


@dataclass(frozen=True, slots=True)
class Mode:
    """What may change the graph of modules besides their input: train or eval, their parameters, frozen or not."""

    training: tuple[bool, ...]
    counts: tuple[int, ...]
    identities: tuple[int, ...]
    kinds: tuple[tuple[bool, torch.dtype] | None, ...]


def mode_of(modules: Sequence[nn.Module]) -> Mode:
    """The Mode that ``modules`` are in now. Asked for at every call: lists take a third of the time of generators."""
    held = [module._parameters for module in modules]
    parameters = [parameter for names in held for parameter in names.values()]
    return Mode(
        tuple([module.training for module in modules]),
        tuple([len(names) for names in held]),
        tuple([id(parameter) for parameter in parameters]),
        tuple([None if p is None else (p.requires_grad, p.dtype) for p in parameters]),
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile(module)`` has compiled it."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def modules_below(root: nn.Module) -> list[nn.Module]:
    """``root`` and every module below it, each once, as ``root.modules()`` has them but in another order, much
    faster."""
    found, seen = [root], {id(root)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def parameter_ids(root: nn.Module) -> set[int]:
    """The ``id`` of every parameter of ``root`` and of what is below it."""
    return {*map(id, chain.from_iterable([m._parameters.values() for m in modules_below(root)]))} - {id(None)}
