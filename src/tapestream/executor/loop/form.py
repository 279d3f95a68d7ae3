"""`Form`: the structure of a loop's state, checked after every step at the price of a few comparisons."""

from collections.abc import Callable, Iterator, Sequence
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

    def test(self) -> Callable[[Any], bool]:
        """Whether a value may stand here: leaves that are no tensors may change as they like. It is asked after every
        step, and looks nothing up."""
        kind, shape, dtype = self.kind, self.shape, self.dtype
        if kind is None:
            return _plain
        return lambda value: isinstance(value, kind) and value.shape == shape and value.dtype == dtype

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
            return cls(spec, parts, _alone, _only, parts[0].test())
        flat = spec.num_nodes == len(parts) + 1 == spec.num_children + 1  # the children are leaves, and nothing else
        if flat and type(tree) in (tuple, list):
            return cls(spec, parts, _itself, type(tree), _row(type(tree), parts))
        if flat and type(tree) is dict:
            return _of_dict(spec, parts, tuple(tree))

        nested = _nested(tree, iter(parts))
        leaves = pytree.tree_leaves if nested is None else spec.flatten_up_to
        matches = nested or _walked(spec, parts)
        return cls(spec, parts, leaves, lambda leaves: pytree.tree_unflatten(leaves, spec), matches)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Places of the leaves that are tensors or arrays."""
        return tuple(i for i, part in enumerate(self.parts) if part.kind is not None)

    def differences(self, tree: Any) -> str:
        """How ``tree`` differs, for a message: the first leaf that does, or the structure."""
        found, own = _shown(pytree.tree_structure(tree)), _shown(self.spec)
        structure = f"the structure {found} instead of {own}"
        if found == own:
            structure += ", of other classes with the same names (make the state's own of them)"
        try:
            leaves = self.spec.flatten_up_to(tree)
        except ValueError:
            return structure
        for part, leaf in zip(self.parts, leaves, strict=True):
            if not pytree.tree_is_leaf(leaf):
                return structure
            if not part.test()(leaf):
                return f"{part.name} = {Leaf.of(part.name, leaf)} instead of {part}"
        return "the same structure"

    def check(self, tree: Any, step: int) -> None:
        """Raise InputError unless ``tree``, returned by step ``step``, has this form."""
        if not self.matches(tree):
            raise self.changed(tree, step)

    def changed(self, tree: Any, step: int) -> InputError:
        """The error for a step that returned something of another form."""
        return InputError(
            f"Loop: step {step} returned {self.differences(tree)}; every step must return the structure, shapes and "
            "dtypes of its state (cast or pad the leaf inside the step)"
        )


def kind_of(value: Any) -> Any:
    """What ``isinstance`` takes for tensors, or for arrays; None for leaves that carry no numbers of their own."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor
    return ARRAYS if isinstance(value, ARRAYS) else None


def _plain(value: Any) -> bool:
    """Whether it is a leaf without numbers of its own: a container might hide tensors."""
    return not isinstance(value, _OTHERS) and type(value) not in pytree.SUPPORTED_NODES


ARRAYS = (numpy.ndarray, numpy.generic)  # operations on arrays without axes give numbers
_OTHERS = (torch.Tensor, *ARRAYS, tuple)  # named tuples are containers too


def _alone(tree: Any) -> tuple[Any]:
    return (tree,)


def _only(leaves: Sequence[Any]) -> Any:
    return leaves[0]


def _itself(tree: Any) -> Any:
    return tree


def _row(kind: type[tuple[Any, ...]] | type[list[Any]], parts: tuple[Leaf, ...]) -> Callable[[Any], bool]:
    # One test a leaf written out, as it runs after every step: `Leaf.test` would double its price.
    tests: tuple[tuple[Any, Any, Any], ...] = tuple((part.kind, part.shape, part.dtype) for part in parts)

    def matches(tree: Any) -> bool:
        if not isinstance(tree, kind) or len(tree) != len(tests):
            return False
        for (wanted, shape, dtype), leaf in zip(tests, tree, strict=True):
            if shape is None:
                if not _plain(leaf):
                    return False
            elif not isinstance(leaf, wanted) or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return True

    return matches


def _nested(tree: Any, parts: Iterator[Leaf]) -> Callable[[Any], bool] | None:
    """The test of a tree of tuples, lists and dictionaries without a walk; None where it has other nodes.

    PyTorch's own walk takes longer than a small step.
    """
    kind = type(tree)
    if pytree.tree_is_leaf(tree):
        return next(parts).test()
    if kind not in (tuple, list, dict):
        return None
    keys, among = (tuple(tree), frozenset(tree)) if kind is dict else (None, frozenset())
    tests = [test for child in (tree.values() if kind is dict else tree) if (test := _nested(child, parts)) is not None]
    if len(tests) < len(tree):
        return None

    def matches(other: Any) -> bool:
        if type(other) is not kind or len(other) != len(tests) or (keys is not None and other.keys() != among):
            return False
        children = other if keys is None else [other[key] for key in keys]
        return all(test(child) for test, child in zip(tests, children, strict=True))

    return matches


def _walked(spec: pytree.TreeSpec, parts: tuple[Leaf, ...]) -> Callable[[Any], bool]:
    """The test of a tree of other nodes, by PyTorch's own walk."""
    tests = [part.test() for part in parts]

    def matches(other: Any) -> bool:
        leaves, found = pytree.tree_flatten(other)
        return found == spec and all(test(leaf) for test, leaf in zip(tests, leaves, strict=True))

    return matches


def _of_dict(spec: pytree.TreeSpec, parts: tuple[Leaf, ...], keys: tuple[Any, ...]) -> Form:
    inner, among = _row(list, parts), frozenset(keys)

    def leaves_of(tree: Any) -> list[Any]:
        return [tree[key] for key in keys]  # a step may write them down in another order

    def matches(tree: Any) -> bool:
        return type(tree) is dict and tree.keys() == among and inner(leaves_of(tree))

    return Form(spec, parts, leaves_of, lambda leaves: dict(zip(keys, leaves, strict=True)), matches)


def _shown(spec: pytree.TreeSpec) -> str:
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "*")
