"""The tensors of whatever a program returns: containers, dataclasses and mappings of any class."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def found_in(tree: Any) -> list[torch.Tensor]:
    """The distinct tensors of ``tree``, in order."""
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    replaced(tree, note)
    return list(found.values())


def replaced(tree: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``tree`` with ``by(tensor)`` in place of each tensor; containers that hold none are left as they are."""
    if isinstance(tree, torch.Tensor):
        return by(tree)
    if isinstance(tree, dict):
        items = {key: replaced(value, by) for key, value in tree.items()}
        if all(items[key] is tree[key] for key in items):
            return tree
        out = copy.copy(tree)
        for key, value in items.items():
            out[key] = value
        return out
    if isinstance(tree, (tuple, list)):
        parts = [replaced(item, by) for item in tree]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        if isinstance(tree, list):
            return type(tree)(parts)
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: replaced(getattr(tree, f.name), by) for f in dataclasses.fields(tree)}
        if all(value is getattr(tree, name) for name, value in fields.items()):
            return tree
        changed: Any = copy.copy(tree)
        for name, value in fields.items():
            object.__setattr__(changed, name, value)
        return changed
    return tree
