"""Objects and containers through which blocks pass tensors with gradients: keys and values that later blocks share."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tapestream.errors import GradientError, InputError
from tapestream.runner.private import may_change, refill, shared_in, slots_of, tensors_in

Replace = Callable[[Any], Any]
"""What takes the place of a tensor, a `_Slot` or an object; `_KEPT` for what is to be looked into."""

_KEPT = object()


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Stands for a tensor: number ``number`` of those that came in, or (``left``) that the block has left."""

    number: int
    left: bool


@dataclass(slots=True)
class _Changed:
    """What a block has made of copies of the caller's objects: pairs of an object and its copy, without tensors that
    carry a gradient."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


class Passed:
    """Of an observed call: which blocks pass tensors with gradients on in objects. ``positions``: those known to, from
    earlier such calls too; ``again``: more have been found, and what has run did not know."""

    def __init__(self, positions: set[int]) -> None:
        self.positions, self.again = positions, False
        self._left_by: dict[int, tuple[torch.Tensor, int | None]] = {}

    def found(self, position: int, tensors: Sequence[torch.Tensor]) -> None:
        """Block ``position`` takes these from objects; whoever left them there must hand them out."""
        self.positions.add(position)
        for _, left_by in (self._left_by.get(id(t), (t, None)) for t in tensors):
            if left_by is not None and left_by not in self.positions:
                self.positions.add(left_by)
                self.again = True

    def note(self, things: Sequence[Any], position: int | None) -> None:
        """What requires a gradient in ``things``, and was not there before, was put there by block ``position`` (None:
        by something else)."""
        for t in tensors_in(things):
            if t.requires_grad:
                self._left_by.setdefault(id(t), (t, position))


class Passing:
    """Objects among the arguments of one block's call. ``tensors``: those in them that require a gradient, which are
    entries of its state; what it leaves in them goes out with what it returns.

    Each run gets copies of its own. After the first, the caller's objects get what that one has done to them.
    """

    def __init__(self, name: str, things: Sequence[Any]) -> None:
        self.name, self._things = name, list(things)
        self.tensors = [t for t in tensors_in(things) if t.requires_grad]
        self._slots = [_Slot(number, left=False) for number in range(len(self.tensors))]
        self._before: list[Any] | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._copied_from: dict[int, Any] = {}  # by id of what is in ``_before``: the caller's
        self._changed: _Changed | None = None

    def keep(self, *, clone: bool) -> None:
        """The block will run again: remember the objects as they are now."""
        made = {id(t): slot for t, slot in zip(self.tensors, self._slots, strict=True)}
        of_rest = torch.Tensor.clone if clone else _itself
        self._before, pairs = _copied(self._things, lambda t: made.get(id(t)) or of_rest(t))
        self._copied_from = {id(copied): thing for thing, copied in pairs}
        self._versions = [(t, t._version) for t in tensors_in(self._before)]

    def copies(self, now: Sequence[torch.Tensor], *, again: bool, clone: bool) -> tuple[list[Any], list[Any]]:
        """For one run, with ``now`` in place of `tensors`: copies, and pairs of the caller's objects with theirs.

        Raises GradientError where other tensors in them have changed since.
        """
        of_rest = torch.Tensor.clone if clone and again else _itself
        if not again or self._before is None:
            stands = {id(t): one for t, one in zip(self.tensors, now, strict=True)}
            return _copied(self._things, lambda t: stands.get(id(t), t))
        if any(t._version != version for t, version in self._versions):
            raise GradientError(
                f"a tensor inside an argument of {self.name} was modified by an in-place operation after the block had "
                "used it, so recomputing would see the new values; put a new tensor in its place instead"
            )
        memo = {id(slot): one for slot, one in zip(self._slots, now, strict=True)}
        copies, pairs = _copied(self._before, of_rest, memo)
        known = ((self._copied_from.get(id(before)), copied) for before, copied in pairs)
        return copies, [(thing, copied) for thing, copied in known if thing is not None]

    def left(
        self, copies: Sequence[Any], pairs: list[Any], now: Sequence[torch.Tensor], held: list[tuple[torch.Tensor, int]]
    ) -> list[torch.Tensor]:
        """Tensors that a run has left in ``copies``; ``held``: those that were in them, with their versions. The first
        run's copies are kept for `show`.

        Raises InputError where the run has written into what came in with a gradient.
        """
        given, mine = {id(t) for t, _ in held}, set(map(id, now))
        if any(t._version != version for t, version in held if id(t) in mine):
            raise InputError(
                f"{self.name} writes into a tensor that requires a gradient, inside of an object or container that it "
                "is given, and others would not see that; put a new tensor in its place instead"
            )
        found = [t for t in tensors_in(copies) if id(t) not in given and (t.is_floating_point() or t.is_complex())]
        if self._changed is None:
            slots: dict[int, _Slot] = {id(t): slot for t, slot in zip(now, self._slots, strict=True)}
            slots |= {id(t): _Slot(number, left=True) for number, t in enumerate(found)}
            known = lambda one: slots.get(id(one), one.detach()) if isinstance(one, torch.Tensor) else _KEPT  # noqa: E731
            _replaced(list(copies), known, set())
            self._changed = _Changed(pairs)
        return found

    def show(self, left: Sequence[torch.Tensor]) -> None:
        """The caller's objects get what the first run has done to them, with ``left`` in place of what it has left."""
        assert self._changed is not None
        pairs, self._changed = self._changed.pairs, _Changed()
        callers = {id(copied): thing for thing, copied in pairs}
        tensors = self.tensors

        def outer(one: Any) -> Any:
            if isinstance(one, _Slot):
                return (left if one.left else tensors)[one.number]
            return callers.get(id(one), one if isinstance(one, torch.Tensor) else _KEPT)

        seen: set[int] = set()
        for _, copied in pairs:
            _replace_inside(copied, outer, seen)
        for thing, copied in pairs:
            refill(thing, copied)
            if isinstance(getattr(thing, "__dict__", None), dict):
                refill(vars(thing), vars(copied))
            for name in slots_of(thing):
                setattr(thing, name, getattr(copied, name))
        self._things, self.tensors, self._copied_from = [], [], {}


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copied(
    things: Sequence[Any], of_tensor: Replace, memo: dict[int, Any] | None = None
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Copies of ``things``, and of all that can change in them pairs with what was made of it."""
    memo = memo or {}
    memo |= {id(x): of_tensor(x) if isinstance(x, torch.Tensor) else x for x in shared_in(things)}
    kept = [*things]
    copies = copy.deepcopy(kept, memo)
    originals = [one for one in memo.get(id(memo), ()) if one is not kept]
    attributes = {id(vars(one)) for one in originals if hasattr(one, "__dict__")}
    pairs = [(one, memo[id(one)]) for one in originals if id(one) not in attributes and id(one) in memo]
    return copies, [(one, made) for one, made in pairs if made is not one and not isinstance(one, tuple)]


def _replaced(value: Any, new: Replace, seen: set[int]) -> Any:
    """``value`` with ``new`` of what is in it, at any depth; what can be changed is, in place."""
    found = new(value)
    if found is not _KEPT:
        return found
    if not may_change(value):
        return value
    if isinstance(value, (tuple, frozenset)):
        inside = [_replaced(one, new, seen) for one in value]
        if all(a is b for a, b in zip(inside, value, strict=True)):
            return value
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    _replace_inside(value, new, seen)
    return value


def _replace_inside(value: Any, new: Replace, seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    for place, key, one in list(_places(value)):
        other = _replaced(one, new, seen)
        if other is not one:
            place(key, other)
    if isinstance(value, set):
        refill(value, {_replaced(one, new, seen) for one in value})


def _places(value: Any) -> Iterator[tuple[Callable[[Any, Any], None], Any, Any]]:
    """How to put something else there, and what is there now."""
    if isinstance(value, dict):
        yield from ((lambda k, v: dict.__setitem__(value, k, v), k, v) for k, v in value.items())
    elif isinstance(value, list):
        yield from ((lambda k, v: list.__setitem__(value, k, v), k, v) for k, v in enumerate(value))
    elif isinstance(value, deque):
        yield from ((lambda k, v: deque.__setitem__(value, k, v), k, v) for k, v in enumerate(value))
    if isinstance(getattr(value, "__dict__", None), dict):
        yield from ((vars(value).__setitem__, k, v) for k, v in vars(value).items())
    yield from ((lambda k, v: object.__setattr__(value, k, v), k, getattr(value, k)) for k in slots_of(value))
