"""`Operation`: one call of a function between two blocks, as it can be run again."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError
from tapestream.runner.ambient import Autocast, TorchGenerators
from tapestream.runner.guards import Mark, mark


@dataclass(frozen=True, slots=True)
class Value:
    """What an operation is given that a recompute makes: tensor ``number`` of its `Work`. ``requires``: a gradient."""

    number: int
    requires: bool

    def tensor(self, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """It, of a recompute."""
        return values[self.number]


@dataclass(frozen=True, slots=True)
class Constant:
    """What an operation is given that nothing makes again: a parameter, a mask, a tensor from an earlier block."""

    held: torch.Tensor
    mark: Mark
    requires: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Constant":
        """``tensor`` as it is now, without its graph."""
        held = tensor if tensor.is_leaf else tensor.detach()
        return cls(held, mark(held), tensor.requires_grad)

    def tensor(self, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """It. Raises GradientError where it was changed."""
        if mark(self.held) != self.mark:
            raise GradientError(
                f"a tensor of shape {tuple(self.held.shape)} that the model used between two blocks was modified by an "
                "in-place operation afterwards, so recomputing would use the new values; clone() it first"
            )
        return self.held


Source = Value | Constant


def mapped(tree: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """``tree`` with every object of ``kind`` in its lists, tuples and dictionaries changed."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)([mapped(one, kind, change) for one in tree])
    if type(tree) is dict:
        return {name: mapped(one, kind, change) for name, one in tree.items()}
    if isinstance(tree, (tuple, list, dict)) and type(tree) is not torch.Size:
        return pytree.tree_map(lambda one: change(one) if isinstance(one, kind) else one, tree)
    return tree


@dataclass(slots=True)
class Operation:
    """``func`` with its arguments, where tensors are `Source`s, and what it was called in. ``made``: by place among the
    tensors of its result, the number of each that it has made. ``saves``: how many tensors autograd has saved;
    ``dropped``: which of them a recompute makes."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: bool
    autocast: Autocast
    generators: TorchGenerators | None = None
    made: dict[int, int] = field(default_factory=dict)
    saves: int = 0
    dropped: frozenset[int] = frozenset()

    def used(self) -> set[int]:
        """Numbers of the values that it is given."""
        found = set[int]()
        mapped([self.args, self.kwargs], Value, lambda one: found.add(one.number))
        return found

    def constants(self) -> list[torch.Tensor]:
        """Tensors that it holds."""
        found = list[torch.Tensor]()
        mapped([self.args, self.kwargs], Constant, lambda one: found.append(one.held))
        return found

    def run(self, values: dict[int, torch.Tensor], saved: list[torch.Tensor] | None, device: torch.device) -> None:
        """Run it again on ``values``, to which its results are added. ``saved`` (None: none are wanted) gets what
        autograd saves."""
        graph, known = self.graph and saved is not None, dict[object, torch.Tensor]()

        def given(source: Source) -> torch.Tensor:
            key = source.number if isinstance(source, Value) else id(source.held)
            if (key, type(source)) not in known:
                tensor = source.tensor(values).detach()
                known[key, type(source)] = tensor.requires_grad_() if graph and source.requires else tensor
            return known[key, type(source)]

        args, kwargs = mapped((self.args, self.kwargs), (Value, Constant), given)
        known.clear()
        with self._around(graph, device), _collecting(saved) if graph else contextlib.nullcontext():
            result = self.func(*args, **kwargs)
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        for place, number in self.made.items():
            values[number] = tensors[place].detach()

    @contextlib.contextmanager
    def _around(self, graph: bool, device: torch.device) -> Iterator[None]:
        if self.generators is not None:
            self.generators.restore()
        now = Autocast.capture(device)
        casting = self.autocast.entered(cache=False) if now != self.autocast else contextlib.nullcontext()
        with torch.set_grad_enabled(graph), casting:
            yield


def _collecting(saved: list[torch.Tensor] | None) -> saved_tensors_hooks:
    assert saved is not None

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor.detach())
        return len(saved)

    def unpack(_: int) -> torch.Tensor:
        raise AssertionError("nobody differentiates this graph")

    return saved_tensors_hooks(pack, unpack)
