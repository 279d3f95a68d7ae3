"""Calls of blocks that are alike: two are run and measured, of the others only what they return is made."""

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.runner.private import may_change

T = TypeVar("T")
Made: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_Leaf: TypeAlias = Callable[[Sequence[torch.Tensor]], Any]
"""Makes one leaf of what a call returns, of the tensors that it is given."""
_ENOUGH = 2  # calls that were measured and found to be the same
_OF_MODULES = set(vars(nn.Module()))
_PLACES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id", "idx", "index"}
"""Attributes that say the how manieth a block is. They are overlooked where a call only hands them on (to a cache that
is not there); nothing else is that two blocks differ in."""
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Known(Generic[T]):
    """What calls of one kind gave: the last ``calls`` of them ``value``. ``made``: makes what they return; None where
    nobody knows how. ``differs``: a call has left something in its block, which others may look for, or has computed
    with the place of its block."""

    value: T | None = None
    calls: int = 0
    made: "Made | None" = None
    differs: bool = False

    def known(self) -> T | None:
        """What such calls give; None: this one has to be run."""
        return self.value if self.calls >= _ENOUGH and self.made is not None and not self.differs else None

    def noting(self, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """``function``, a call of ``module``, of which is noted what it returns and leaves."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            before = _held(module)
            with _watching(module) as used:
                out = function(*args, **kwargs)
            self.made, self.differs = _maker(args, kwargs, out), self.differs or bool(used) or _held(module) != before
            return out

        return noted

    def returning(self, *args: Any, **kwargs: Any) -> Any:
        """What the function would return."""
        assert self.made is not None
        return self.made(args, kwargs)

    def learn(self, value: T) -> None:
        """Such a call was run and gave ``value``."""
        self.calls = self.calls + 1 if self.value is value else 1
        self.value = value


class Alike(Generic[T]):
    """What is known of calls by what they are of: the structure of the block, and the shapes of what it is given."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._structures = _structures(modules)
        self._known: dict[Hashable, Known[T]] = {}

    def of(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known[T] | None:
        """What is known of a call of the module at ``position``; None where nobody can tell what it is like."""
        structure = self._structures[position]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if structure is None or any(not _is_tensor(leaf) and may_change(leaf) for leaf in leaves):
            return None
        numbers = _numbers(leaf.untyped_storage()._cdata for leaf in leaves if _is_tensor(leaf))
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return self._known.setdefault((structure, spec, tuple(map(_shape_of, leaves)), numbers, modes), Known())


def _structures(modules: Sequence[nn.Module]) -> list[Hashable | None]:
    """Of each module, a number that those of the same structure share: classes, parameters, attributes; None where
    hooks may do anything."""
    numbers: dict[Hashable, int] = {}
    found = map(_structure, modules)
    return [None if one is None else numbers.setdefault(one, len(numbers)) for one in found]


def _structure(module: nn.Module) -> Hashable | None:
    parts: list[Hashable] = []
    for name, one in module.named_modules():
        if any(vars(one)[kind] for kind in vars(one) if kind.endswith("_hooks") and kind in _OF_MODULES):
            return None
        own = vars(one)
        attributes = tuple(
            (key, _shape_of(value)) for key, value in own.items() if key not in _OF_MODULES and key not in _PLACES
        )
        tensors = {**one._parameters, **one._buffers}
        parts.append((name, type(one), one.training, attributes, tuple((k, _shape_of(t)) for k, t in tensors.items())))
    held = (t for one in module.modules() for t in (*one._parameters.values(), *one._buffers.values()))
    return tuple(parts), _numbers(id(t) for t in held)


@contextlib.contextmanager
def _watching(module: nn.Module) -> Iterator[list[str]]:
    """What is done with the places of ``module`` and of those inside: names of methods of int."""
    used: list[str] = []
    places = [
        (vars(one), key, value)
        for one in module.modules()
        for key, value in vars(one).items()
        if key in _PLACES and type(value) is int
    ]
    for own, key, value in places:
        own[key] = _Place(value)
        own[key].used = used
    try:
        yield used
    finally:
        for own, key, value in places:
            own[key] = value


class _Place(int):
    """A number that notes when something is computed with it."""

    used: list[str]


def _noting(name: str) -> Callable[..., Any]:
    def method(self: _Place, *args: Any) -> Any:
        self.used.append(name)
        return getattr(int(int.__int__(self)), name)(*args)

    return method


for _name in (
    "lt", "le", "eq", "ne", "gt", "ge", "hash", "bool", "index", "float", "str", "repr", "format", "neg", "add", "radd",
    "sub", "rsub", "mul", "rmul", "mod", "rmod", "floordiv", "rfloordiv", "truediv", "rtruediv", "divmod", "and", "or",
    "xor", "lshift", "rshift", "pow",
):  # fmt: skip
    setattr(_Place, f"__{_name}__", _noting(f"__{_name}__"))


def _held(module: nn.Module) -> list[tuple[int, int]]:
    """Which objects are attributes of ``module`` and of those inside, and how many things are in each."""
    values = (value for one in module.modules() for key, value in vars(one).items() if key not in _OF_MODULES)
    return [(id(value), len(value) if isinstance(value, _CONTAINERS) else 0) for value in values]


def _plain(value: Any) -> Hashable:
    """A value that can be compared, or which object it is."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list):
        return type(value), tuple(map(_plain, value))
    return id(value)


def _shape_of(leaf: Any) -> Hashable:
    if _is_tensor(leaf):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return _plain(leaf)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _numbers(things: Iterable[Any]) -> tuple[int, ...]:
    """Which of them are the same, by the order in which they come."""
    known: dict[Any, int] = {}
    return tuple(known.setdefault(thing, len(known)) for thing in things)


def _maker(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Made | None:
    """What makes something like ``out``, which a call with these arguments returned: new tensors, and those of the
    arguments that it handed on. None where a result is a view of something, or an object."""
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
    ids, storages = {id(t): k for k, t in enumerate(given)}, {t.untyped_storage()._cdata for t in given}
    leaves, spec = pytree.tree_flatten(out)
    plans: list[_Leaf] = []
    fresh: set[int] = set()
    for leaf in leaves:
        if not _is_tensor(leaf):
            if not isinstance(leaf, _PLAIN):
                return None
            plans.append(partial(_same, leaf))
        elif id(leaf) in ids:
            plans.append(partial(_input, ids[id(leaf)]))
        else:
            storage = leaf.untyped_storage()
            if storage._cdata in storages | fresh or storage.nbytes() != leaf.numel() * leaf.itemsize:
                return None
            fresh.add(storage._cdata)
            plans.append(partial(_new, leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
    return partial(_made, plans, spec)


def _made(plans: Sequence[_Leaf], spec: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
    return pytree.tree_unflatten([plan(inputs) for plan in plans], spec)


def _same(value: Any, _: Sequence[torch.Tensor]) -> Any:
    return value


def _input(number: int, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return inputs[number]


def _new(
    shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, _: Sequence[torch.Tensor]
) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu", requires_grad=requires_grad)
