"""`Form`: the structure of a loop's state, checked after every step at the price of a few comparisons."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from tapestream.errors import InputError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf: where it stands (``state['h']``), and for tensors and arrays their kind, shape and dtype."""

    name: str
    kind: Any = None
    shape: Any = None
    dtype: Any = None

    @classmethod
    def of(cls, name: str, value: Any) -> "Leaf":
        """The leaf as it is now."""
        kind = kind_of(value)
        return cls(name) if kind is None else cls(name, kind, value.shape, value.dtype)

    def fits(self, value: Any) -> bool:
        """Whether ``value`` may stand here: leaves that are no tensors may change as they like."""
        kind = self.kind
        if kind is None:
            return kind_of(value) is None
        return isinstance(value, kind) and value.shape == self.shape and value.dtype == self.dtype

    def __str__(self) -> str:
        return "no tensor" if self.kind is None else f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Form:
    """What every state of a loop looks like. ``leaves`` gives a tree's leaves in order, ``build`` is its inverse.

    States that are one leaf, or a tuple, list or dictionary of leaves, are taken apart without a walk.
    """

    spec: pytree.TreeSpec
    parts: tuple[Leaf, ...]
    leaves: Callable[[Any], Sequence[Any]]
    build: Callable[[Sequence[Any]], Any]
    matches: Callable[[Any], bool]

    @classmethod
    def of(cls, tree: Any, what: str = "state") -> "Form":
        """The form of ``tree``; ``what`` names it in messages."""
        pairs, spec = pytree.tree_flatten_with_path(tree)
        parts = tuple(Leaf.of(what + pytree.keystr(path), value) for path, value in pairs)
        if spec.is_leaf():
            return cls(spec, parts, _alone, _only, parts[0].fits)
        if type(tree) in (tuple, list) and len(parts) == len(tree) and all(c.is_leaf() for c in spec.children()):
            return cls(spec, parts, _itself, type(tree), _row(type(tree), parts))
        if type(tree) is dict and len(parts) == len(tree) and all(c.is_leaf() for c in spec.children()):
            return _of_dict(spec, parts, tuple(tree))

        def matches(other: Any) -> bool:
            leaves, found = pytree.tree_flatten(other)
            return found == spec and all(part.fits(leaf) for part, leaf in zip(parts, leaves, strict=True))

        return cls(spec, parts, pytree.tree_leaves, lambda leaves: pytree.tree_unflatten(leaves, spec), matches)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Places of the leaves that are tensors or arrays."""
        return tuple(i for i, part in enumerate(self.parts) if part.kind is not None)

    def differences(self, tree: Any) -> str:
        """How ``tree`` differs, for a message: the first leaf that does, or the structure."""
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            return f"the structure {_shown(spec)} where it was {_shown(self.spec)}"
        for part, leaf in zip(self.parts, leaves, strict=True):
            if not part.fits(leaf):
                return f"{part.name} = {Leaf.of(part.name, leaf)} where it was {part}"
        return "the same structure"

    def check(self, tree: Any, step: int) -> None:
        """Raise InputError unless ``tree``, returned by step ``step``, has this form."""
        if not self.matches(tree):
            raise self.changed(tree, step)

    def changed(self, tree: Any, step: int) -> InputError:
        """The error for a step that returned something of another form."""
        return InputError(
            f"Loop: step {step} returned {self.differences(tree)}; every step must return a state of the structure, "
            "shapes and dtypes that it was given (cast or pad the leaf inside the step)"
        )


def kind_of(value: Any) -> Any:
    """What ``isinstance`` takes for tensors, or for arrays; None for leaves that carry no numbers of their own."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return _ARRAYS if isinstance(value, _ARRAYS) else None


_ARRAYS = (numpy.ndarray, numpy.generic)  # operations on arrays without axes give numbers


def _alone(tree: Any) -> tuple[Any]:
    return (tree,)


def _only(leaves: Sequence[Any]) -> Any:
    return leaves[0]


def _itself(tree: Any) -> Any:
    return tree


def _row(kind: type[tuple[Any, ...]] | type[list[Any]], parts: tuple[Leaf, ...]) -> Callable[[Any], bool]:
    # One test a leaf written out, as it runs after every step: `Leaf.fits` would double its price.
    tests: tuple[tuple[Any, Any, Any], ...] = tuple((part.kind, part.shape, part.dtype) for part in parts)

    def matches(tree: Any) -> bool:
        if not isinstance(tree, kind) or len(tree) != len(tests):
            return False
        for (wanted, shape, dtype), leaf in zip(tests, tree, strict=True):
            if shape is None:
                if kind_of(leaf) is not None:
                    return False
            elif not isinstance(leaf, wanted) or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return True

    return matches


def _of_dict(spec: pytree.TreeSpec, parts: tuple[Leaf, ...], keys: tuple[Any, ...]) -> Form:
    inner = _row(list, parts)

    def matches(tree: Any) -> bool:
        return type(tree) is dict and tuple(tree) == keys and inner(list(tree.values()))

    return Form(
        spec, parts, lambda tree: list(tree.values()), lambda leaves: dict(zip(keys, leaves, strict=True)), matches
    )


def _shown(spec: pytree.TreeSpec) -> str:
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "*")
