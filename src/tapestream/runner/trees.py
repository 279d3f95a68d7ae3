"""Trees of tensors as `torch.utils._pytree` has them, in which dataclasses that hold tensors are nodes too."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_OF_THEIR_OWN = (dict, list, tuple, set, frozenset, torch.Tensor, nn.Module, BaseException, type)
"""Dataclasses that are one of these, too, are not made from their fields alone."""


class _Opened:
    """Stands for an instance of a dataclass while a tree is taken apart."""

    def __init__(self, cls: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.cls, self.names, self.values = cls, names, values


def _rebuilt(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """An instance with these attributes: without ``__init__``, which may take others, and frozen ones too."""
    cls, names = context
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Opened, lambda one: (one.values, (one.cls, one.names)), _rebuilt)


def tree_flatten(tree: Any, opens: Callable[[Any], bool] = lambda instance: True) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; `tree_unflatten` of pytree makes instances of the same classes anew. ``opens``: which
    dataclasses are taken apart, of those that hold tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(is_instance, leaves)):
        return leaves, spec
    return pytree.tree_flatten(pytree.tree_map(lambda leaf: _open(leaf, opens, ()), tree))


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves alone."""
    return tree_flatten(tree)[0]


def is_instance(leaf: Any) -> bool:
    """Whether it is an instance of a dataclass that can be made anew from its attributes."""
    return is_dataclass(type(leaf)) and not isinstance(leaf, _OF_THEIR_OWN)


def _open(leaf: Any, opens: Callable[[Any], bool], around: tuple[Any, ...]) -> Any:
    if not is_instance(leaf) or any(leaf is one for one in around) or not opens(leaf):
        return leaf
    own = [field.name for field in fields(leaf) if hasattr(leaf, field.name)]
    names = tuple(dict.fromkeys((*own, *getattr(leaf, "__dict__", {}))))
    inside = [pytree.tree_map(lambda one: _open(one, opens, (*around, leaf)), getattr(leaf, name)) for name in names]
    if not any(isinstance(one, torch.Tensor) for one in pytree.tree_leaves(inside)):
        return leaf  # a configuration, say: it stays the same object
    return _Opened(type(leaf), names, inside)
