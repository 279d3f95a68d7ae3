"""Private copies of objects that a block may change while it runs: key-value caches, counters, lists."""

import copy
import enum
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError

_FIXED = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, nn.Module, torch.Tensor, torch.Generator,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip


def may_change(thing: Any) -> bool:
    """Whether running a block can change ``thing``, an argument of it that is no tensor."""
    return not isinstance(thing, _FIXED)


def tensors_in(things: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor that attributes and containers of ``things`` lead to, each once."""
    return [found for found in shared_in(things) if isinstance(found, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class Before:
    """Objects as they were before a block's first run. Tensors in them are shared, unless the block writes into
    them."""

    things: tuple[Any, ...]
    versions: tuple[tuple[torch.Tensor, int], ...]

    @classmethod
    def take(cls, things: Sequence[Any], *, clone: bool) -> "Before":
        """Copy ``things``, and with ``clone`` the tensors in them too. Both stay in their graph."""
        copied = _copied(things, _clone if clone else _itself)
        return cls(copied, tuple((t, t._version) for t in tensors_in(copied)))

    def copies(self, name: str, *, clone: bool) -> tuple[Any, ...]:
        """For one more run of the block ``name``. Raises GradientError when the tensors in them have changed since."""
        if any(t._version != version for t, version in self.versions):
            raise GradientError(
                f"a tensor inside an argument of {name} was modified by an in-place operation after the block had "
                "used it, so recomputing would see the new values; use an object that appends instead (a dynamic "
                "cache), or none while training (use_cache=False)"
            )
        return _copied(self.things, _clone if clone else _itself)


def copies_of(tree: Any) -> Any:
    """``tree`` with copies, tensors included, in place of the objects that may change."""
    leaves, spec = pytree.tree_flatten(tree)
    changing = [at for at, leaf in enumerate(leaves) if may_change(leaf)]
    for at, copied in zip(changing, _copied([leaves[at] for at in changing], _apart), strict=True):
        leaves[at] = copied
    return pytree.tree_unflatten(leaves, spec)


def detached(things: Sequence[Any], known: Mapping[int, torch.Tensor]) -> Sequence[Any]:
    """Copies of ``things`` that hold the same tensors, cut off from their graph: leaves where these require a
    gradient. ``known``: by id, what to put in the place of some."""
    return _copied(things, lambda t: known[id(t)] if id(t) in known else _cut(t))


def standing_in(things: Sequence[Any], *, clone: bool) -> tuple[Sequence[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Copies of ``things``, with ``clone`` of the tensors in them too, cut off from their graph; and pairs of each
    tensor that requires a gradient with the leaf that stands for it."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        cut = _cut(tensor, clone=clone)
        if tensor.requires_grad:
            found.append((tensor, cut))
        return cut

    return _copied(things, stand_in), found


def take_over(thing: Any, changed: Any) -> None:
    """Give ``thing`` the contents of ``changed``, a copy of it that a block has worked on."""
    refill(thing, changed)
    if isinstance(getattr(thing, "__dict__", None), dict):
        refill(vars(thing), vars(changed))


def refill(container: Any, contents: Any) -> None:
    """Make a dictionary, list, deque or set hold what another one holds; anything else is left as it is."""
    if isinstance(container, list):
        container[:] = contents
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(contents)
    elif isinstance(container, deque):
        container.clear()
        container.extend(contents)


def _copied(things: Sequence[Any], of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    memo = {id(x): of_tensor(x) if isinstance(x, torch.Tensor) else x for x in shared_in(things)}
    return tuple(copy.deepcopy(list(things), memo))


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _cut(tensor: torch.Tensor, *, clone: bool = False) -> torch.Tensor:
    found = tensor.detach().clone() if clone else tensor.detach()
    return found.requires_grad_(tensor.requires_grad)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # with its graph: without, a gradient that flows through it would be lost unseen


def slots_of(thing: Any) -> list[str]:
    """Names of attributes in ``__slots__`` that ``thing`` has."""
    found = [base.__dict__.get("__slots__", ()) for base in type(thing).__mro__]
    names = [name for slots in found for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__") and hasattr(thing, name)]


def shared_in(things: Sequence[Any]) -> Iterator[Any]:
    """What a copy has in common with its original: tensors, modules, generators, functions."""
    seen: set[int] = set()
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _FIXED):
            if isinstance(thing, (torch.Tensor, nn.Module, torch.Generator)):
                yield thing
            continue
        if isinstance(thing, dict):
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            waiting.extend(thing)
        waiting.extend(getattr(thing, "__dict__", {}).values())
        waiting.extend(getattr(thing, name) for name in slots_of(thing))
