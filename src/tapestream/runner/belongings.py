"""What modules and functions hold besides parameters and buffers: lists, objects, tensors and generators in attributes
(those of parameters and buffers, too), in closures and in the globals that they name. A run that changes it may find
something else the next time."""

import contextlib
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from tapestream.capture.buffers import NUMBERS
from tapestream.capture.python_state import GENERATORS, LISTS, SETS, attributes_of, held_by
from tapestream.runner.ambient import same_states, set_state, state_of
from tapestream.runner.bits import same_bits

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN_TYPES = frozenset(_PLAIN)
_EVERY_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = ("tapestream.", "torch.")
"""Whose own objects are none of a stage's belongings: what a compiler keeps, say."""
_DEEPEST, _MOST, _MOST_IN_ALL, _MOST_NBYTES = 8, 10_000, 100_000, 2**20


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Stands for a buffer of that name among the attributes of a module."""

    name: str

    def __str__(self) -> str:
        return self.name


class _Absent:
    """There was no such attribute."""


@dataclass(slots=True)
class _Thing:
    """An object as it was. ``mark``: a tensor's version, a generator's state, an array's content, a list's length;
    ``copy``: of a tensor that was not there before; ``inside``: what it holds, by key (plain values themselves)."""

    value: Any
    mark: Any = None
    copy: torch.Tensor | None = None
    inside: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """``holder`` (a module, container, object or generator) had ``before`` under ``key``, or as its own content (None).
    ``name``: of the attribute, variable or global by which it is reached, with its owner. ``alike``: another tensor of
    the same content is there."""

    holder: Any
    key: Any
    before: Any
    name: str
    alike: bool = False

    @property
    def makes_attribute(self) -> bool:
        """Whether a module has a new attribute."""
        return isinstance(self.holder, nn.Module) and self.before is _Absent

    def now(self) -> Any:
        """What is there now."""
        if self.key is None or isinstance(self.holder, types.GeneratorType):
            return self.holder
        if isinstance(self.holder, ContextVar):
            return self.holder.get(None)
        if isinstance(self.key, _Buffer):
            return self.holder._buffers.get(self.key.name)
        if not isinstance(self.holder, dict) and not hasattr(self.holder, "__dict__"):  # a cell, an object with slots
            return getattr(self.holder, str(self.key), None)
        place, key = place_of(self.holder, self.key)
        return place.get(key)

    def were_there(self) -> set[int]:
        """Ids of the objects that were there."""
        found, waiting = set[int](), [self.before]
        for one in waiting:
            if isinstance(one, _Thing):
                found.add(id(one.value))
                waiting += one.inside.values()
        return found

    def put_back(self) -> None:
        """Let it be there again. What tensors held before they were written into is not known any more."""
        holder, before = self.holder, self.before
        if self.key is None:
            _refill(holder, before)
            return
        value = before.value if isinstance(before, _Thing) else before
        if isinstance(self.key, _Buffer):
            holder._buffers.pop(self.key.name, None)
        elif isinstance(holder, type):  # whose attributes cannot be put into its dictionary
            delattr(holder, self.key) if value is _Absent else setattr(holder, self.key, value)
        elif isinstance(holder, (dict, types.FunctionType)) or hasattr(holder, "__dict__"):
            place, key = place_of(holder, self.key)
            if value is _Absent:
                place.pop(key, None)
            else:
                place[key] = value
        elif isinstance(holder, ContextVar):
            holder.set(value)
        elif value is not _Absent and not isinstance(holder, types.GeneratorType):
            setattr(holder, self.key, value)


class Belongings:
    """What ``modules``, and ``function`` where it is no module, hold now, a few objects deep."""

    def __init__(
        self, modules: Sequence[nn.Module], function: Any = None, since: "Belongings | None" = None,
        copying: bool = True,
    ) -> None:  # fmt: skip
        """``since``: earlier ones to compare with; tensors that were not there then are copied, with ``copying``."""
        self._seen, self._since, self._copying = {id(module) for module in modules}, since, copying
        self._looked = set[type]()  # classes of modules
        self._buffers: dict[int, frozenset[str]] = {}  # of each module, by its id
        self.versions: dict[int, int] = {}
        self.generators: list[Any] = []
        self._roots = [self._module(module) for module in modules]
        self._hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
        if function is not None and not isinstance(function, nn.Module):
            self._roots.append(self._look(function, _DEEPEST))
        owned = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        self._roots += [_Thing(tensor, inside=self._attributes(tensor, _DEEPEST)) for tensor in owned]

    def changes(self, later: "Belongings") -> list[Change]:
        """What of these is another in ``later``. Where hooks were registered in between, attributes that are new stay:
        one of them may tell that this has been done."""
        hooked = self._hooks != later._hooks
        return [one for one in self._all_changes(later) if not (one.alike or (hooked and one.makes_attribute))]

    def replaced(self, later: "Belongings") -> list[Change]:
        """Tensors of these in whose place others of the same content are in ``later``."""
        return [one for one in self._all_changes(later) if one.alike]

    def _all_changes(self, later: "Belongings") -> list[Change]:
        found: list[Change] = []
        for old, new in zip(self._roots, later._roots, strict=False):
            if isinstance(old, _Thing) and isinstance(new, _Thing) and old.value is new.value:
                owner = getattr(old.value, "__name__", type(old.value).__name__)
                found.extend(_inside(old, new, owner))
        return found

    def _module(self, module: nn.Module) -> _Thing:
        thing = _Thing(module)
        for name, value in attributes_of(module).items():
            if name not in _EVERY_MODULES:
                thing.inside[name] = self._look(value, _DEEPEST)
        forward = type(module).forward
        if not str(forward.__module__).startswith(_LIBRARIES):
            thing.inside["forward", ""] = self._look(forward, _DEEPEST)
            thing.inside |= self._classes(type(module))
        for registry in (module._modules, module._parameters):  # which they are: what these hold is looked at elsewhere
            held = {name: None if one is None else _Thing(one) for name, one in registry.items()}
            thing.inside[None, id(registry)] = _Thing(registry, inside=held)
        names = self._buffers[id(module)] = frozenset(module._buffers)
        known = names if self._since is None else self._since._buffers.get(id(module), names)
        for name, buffer in module._buffers.items():
            thing.inside[_Buffer(name)] = True if name in known else self._look(buffer, 1)
        return thing

    def _classes(self, cls: type) -> dict[Any, _Thing]:
        """Numbers, lists, dictionaries and sets that are attributes of a class of modules and of its bases, each class
        once for all modules."""
        found, kinds = dict[Any, _Thing](), (*_PLAIN, list, dict, set)
        # The class of a streamed module goes by the name of its base, and stands for it: whether what a block returns
        # depends on what the base counts, running it twice tells (see `check_repeats`).
        for one in reversed(cls.__mro__[: cls.__mro__.index(nn.Module)]):
            if one not in self._looked:
                self._looked.add(one)
                held = {name: value for name, value in vars(one).items() if not name.startswith("__")}
                own = {name: self._look(value, 1) for name, value in held.items() if isinstance(value, kinds)}
                found[one.__qualname__, ""] = _Thing(one, inside=own)
        return found

    def has_number(self, change: Change) -> bool:
        """Whether what has changed is a number that a module has had from the beginning: a `BufferSnapshot` has it."""
        own = next((one.inside for one in self._roots if isinstance(one, _Thing) and one.value is change.holder), {})
        kinds = type(own.get(change.key, _Absent)), type(change.before)
        return isinstance(change.holder, nn.Module) and NUMBERS.issuperset(kinds)

    def _look(self, value: Any, deep: int) -> Any:
        if _plain(value):
            return value
        thing = _Thing(value)
        if id(value) in self._seen or len(self._seen) > _MOST_IN_ALL:
            return thing
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            thing.mark = self.versions[id(value)] = -1 if value.is_inference() else value._version
            if self._copying and self._since is not None and self._since.versions.get(id(value)) != thing.mark:
                thing.copy = value.detach().clone()
            thing.inside = self._attributes(value, deep - 1)
        elif isinstance(value, GENERATORS):
            thing.mark = state_of(value)
            self.generators.append(value)
        elif isinstance(value, numpy.ndarray):
            thing.mark = value.copy() if value.nbytes <= _MOST_NBYTES and value.dtype.kind != "O" else None
        elif deep > 0:
            items = held_by(value)
            if isinstance(value, (*LISTS, *SETS)) or len(items) > _MOST:
                thing.mark = len(items)
            if len(items) <= _MOST:
                thing.inside = {key: self._look(item, deep - 1) for key, item in items.items()}
        return thing

    def _attributes(self, tensor: torch.Tensor, deep: int) -> dict[Any, Any]:
        """What users, or a library that quantises, have put on a tensor."""
        return {name: self._look(value, deep) for name, value in vars(tensor).items()} if deep >= 0 else {}


def _plain(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return True
    return all(type(item) in _PLAIN_TYPES for item in value) if kind is tuple else isinstance(value, _PLAIN)


def _inside(old: _Thing, new: _Thing, name: str) -> Iterator[Change]:
    """How one object has changed; ``name``: how it is reached."""
    if old.mark is not None and not _same_mark(old, new):
        yield Change(old.value, None, old, name)
    if isinstance(old.value, (*LISTS, *SETS)):
        if old.mark == new.mark:
            yield from _inside_list(old, new, name)
        return
    keys = old.inside if old.inside.keys() == new.inside.keys() else {**old.inside, **new.inside}
    for key in keys:
        before, after = old.inside.get(key, _Absent), new.inside.get(key, _Absent)
        if before is after:
            continue
        called = name if isinstance(old.value, types.CellType) else _called(name, key)
        if _is_one(before, after):
            yield from _inside(before, after, called)
        elif not _equal(before, after):
            yield Change(old.value, key, before, called)
        elif _is_another_tensor(before, after):
            yield Change(old.value, key, before, called, alike=True)


def _called(owner: str, key: Any) -> str:
    if isinstance(key, tuple) and len(key) == 2:  # see `held_by`
        key = key[0]
    return f"{owner}.{key}" if isinstance(key, (str, _Buffer)) else owner


def _inside_list(old: _Thing, new: _Thing, name: str) -> Iterator[Change]:
    for key, before in old.inside.items():
        after = new.inside.get(key, _Absent)
        if _is_one(before, after):
            yield from _inside(before, after, name)
        elif not _equal(before, after):
            yield Change(old.value, None, old, name)
            return
        elif _is_another_tensor(before, after):
            yield Change(old.value, None, old, name, alike=True)


def _is_one(old: Any, new: Any) -> bool:
    return isinstance(old, _Thing) and isinstance(new, _Thing) and old.value is new.value


def _is_another_tensor(old: Any, new: Any) -> bool:
    return isinstance(old, _Thing) and isinstance(old.value, torch.Tensor) and old.value is not new.value


def _same_mark(old: _Thing, new: _Thing) -> bool:
    if isinstance(old.value, torch.Tensor):
        return old.mark == new.mark or (old.copy is not None and same_bits(old.copy, new.value))
    if isinstance(old.value, GENERATORS):
        return same_states(old.mark, new.mark)
    if isinstance(old.value, numpy.ndarray):
        if old.mark is None or new.mark is None:  # too large to be kept
            return True
        return bool(numpy.array_equal(old.mark, new.mark, equal_nan=old.mark.dtype.kind in "fc"))
    return bool(old.mark == new.mark)


def _equal(old: Any, new: Any) -> bool:
    """Whether two objects hold the same, as far as one can tell."""
    if not isinstance(old, _Thing) or not isinstance(new, _Thing):
        return type(old) is type(new) and (old is new or bool(old == new) or (old != old and new != new))
    if type(old.value) is not type(new.value):
        return False
    if old.value is new.value:
        return all(change.alike for change in _inside(old, new, ""))
    if isinstance(old.value, torch.Tensor):
        return same_bits(old.value if old.copy is None else old.copy, new.value)
    if isinstance(old.value, (numpy.ndarray, *GENERATORS)):
        return _same_mark(old, new)
    pairs = ((before, new.inside.get(key, _Absent)) for key, before in old.inside.items())
    return old.inside.keys() == new.inside.keys() and all(_equal(before, after) for before, after in pairs)


def place_of(holder: Any, key: Any) -> tuple[Any, Any]:
    """Where the holder has what `held_by` gives under ``key``, and under which name."""
    if isinstance(holder, dict):
        return holder, key
    if isinstance(key, tuple):
        return (holder.__kwdefaults__ if key[1] == "default" else vars(holder)), key[0]
    return (holder.__globals__ if isinstance(holder, types.FunctionType) else vars(holder)), key


def _refill(holder: Any, before: _Thing) -> None:
    held = [one.value if isinstance(one, _Thing) else one for one in before.inside.values()]
    if isinstance(holder, GENERATORS):
        set_state(holder, before.mark)
    elif isinstance(holder, numpy.ndarray):
        numpy.copyto(holder, before.mark)
    elif isinstance(holder, set):
        holder.clear()
        holder.update(before.inside)
    elif isinstance(holder, (list, deque)) and len(held) == before.mark:  # else too many to be looked at
        holder.clear()
        holder.extend(held)


@contextlib.contextmanager
def unchanged(modules: Sequence[nn.Module], function: Any = None) -> Iterator[None]:
    """They hold afterwards what they held before. What is new goes, too: who makes or draws something at the first call
    does it again in the one that counts."""
    before = Belongings(modules, function)
    try:
        yield
    finally:
        undo(before.changes(Belongings(modules, function)))


def undo(changes: Sequence[Change]) -> None:
    """Put back what was before, the latest first."""
    for change in reversed(changes):
        change.put_back()
