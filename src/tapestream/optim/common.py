"""`Common`: what an optimizer keeps beside the state of single parameters, advanced once a step, whatever its parts."""

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, TypeAlias

import torch

from tapestream.errors import GradientError

Groups: TypeAlias = Callable[[], Sequence[MutableMapping[str, Any]]]
Place: TypeAlias = tuple[str, int, Any]
"""``("group", number, key)``, ``("attribute", 0, name)``, or ``("state", 0, key)`` where the key is no parameter."""

ATTRIBUTES = "attributes"
_NOT_COMMON = frozenset(("state", "param_groups"))
_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Way:
    """How an optimizer is to be stepped part by part, as a trial has found it. ``parameters``: it is shown what is a
    `torch.nn.Parameter`; ``all_groups``: groups without a tensor in a part are shown, too; ``counts``: it writes into
    its groups or itself; ``in_place``: places of what it changes without another object taking its place;
    ``replaces``: it makes tensors of its state anew in each step; ``writes_gradients``: into them,
    in place; ``closure_calls``: how often it calls a closure."""

    parameters: bool = False
    all_groups: bool = False
    counts: bool = False
    in_place: frozenset[tuple[str, Any]] = frozenset()
    replaces: bool = False
    writes_gradients: bool = False
    closure_calls: int = 1


class Common:
    """Entries of param_groups, attributes of the optimizer, and entries of its state that are no parameter's.

    Plain PyTorch takes one step for all tensors; here each part of it begins with what these were before the step, and
    what they are after it is shown once the step is over. ``groups()`` gives the param_groups that users see.
    """

    def __init__(self, name: str, groups: Groups, way: Way) -> None:
        self._name, self._groups, self.way = name, groups, way
        self._given: list[dict[str, Any]] = []  # the groups as they were when the step began
        self.attributes: dict[str, Any] = {}  # those that steps have changed
        self.state: dict[Any, Any] = {}
        self.seen: set[int] = set()  # groups of which this step had a tensor
        self.begun = False
        self._after: dict[Place, Any] = {}
        self._unsure: set[Place] = set()  # seen of groups that had no tensor in a part

    def step(
        self,
        inner: torch.optim.Optimizer,
        shown: Sequence[tuple[int, list[Any]]],
        state: MutableMapping[Any, Any],
        stand_ins: frozenset[int] = frozenset(),
    ) -> None:
        """One step of ``inner`` on the tensors ``shown``, by group; those of ``stand_ins`` are no tensors of it.

        Raises GradientError where parts of a step disagree about what is common to them.
        """
        groups, own = self._groups(), vars(inner)
        if not self.begun:
            self._given = [dict(group) for group in groups]
        chosen = [{**groups[number], "params": targets} for number, targets in shown]
        if self.attributes:
            own.update(self.attributes)
        if self.state:
            state.update(copied(self.state))
        base = dict(own) if self.way.in_place else own
        for kind, key in self.way.in_place:
            for there in chosen if kind == "group" else [own]:
                if key in there:
                    there[key] = copied(there[key])
        inner.param_groups, inner.state = chosen, state  # type: ignore[assignment]
        before, given = dict(own), [list(group.values()) for group in chosen]
        try:
            with torch.enable_grad():
                inner.step()
        finally:
            inner.param_groups, inner.state = before["param_groups"], before["state"] = [], defaultdict(dict)
        if self.way.in_place or _other(own, before.values()) or any(map(_other, chosen, given)):
            self._note_all(shown, chosen, own, before if base is own else base, stand_ins)
        none = len(stand_ins) == len(shown)  # only counted
        for key in [key for key in state if type(key) is not torch.Tensor and not isinstance(key, torch.Tensor)]:
            self._note(("state", 0, key), state.pop(key), none)
        self.begun = True
        self.seen.update(number for number, _ in shown if number not in stand_ins)

    def _note_all(
        self,
        shown: Sequence[tuple[int, list[Any]]],
        chosen: Sequence[Mapping[str, Any]],
        own: dict[str, Any],
        before: Mapping[str, Any],
        stand_ins: frozenset[int],
    ) -> None:
        """What the step has written into the groups that it was given; and into itself, which is undone."""
        groups = self._groups()
        for (number, _), group in zip(shown, chosen, strict=True):
            outer = groups[number]
            for key, value in group.items():
                if key != "params" and outer.get(key, _NOTHING) is not value:
                    self._note(("group", number, key), value, number in stand_ins)
        for name in [n for n, value in own.items() if before.get(n, _NOTHING) is not value and n not in _NOT_COMMON]:
            self._note(("attribute", 0, name), own.pop(name), len(stand_ins) == len(shown))
            if name in before:
                own[name] = before[name]

    def adopt(self, inner: torch.optim.Optimizer) -> None:
        """Take what a constructor has put into the state for no parameter, where nothing is known of it."""
        own = {key: value for key, value in inner.state.items() if not isinstance(key, torch.Tensor)}
        self.state = {**copied(own), **self.state}

    def check_unchanged(self) -> None:
        """Raise GradientError where a group was written into since the step began, within a backward."""
        for number, (before, group) in enumerate(zip(self._given, self._groups(), strict=False)):
            for key, value in group.items() if self.begun else ():
                if key != "params" and not same(value, before.get(key, _NOTHING)):
                    raise GradientError(
                        f"param_groups[{number}][{key!r}] was changed between backward() and step(), but with "
                        "update='backward' that backward has updated the blocks already: change it before the "
                        "backward (or after step(), as schedulers do), or use update='step'. Set back, step() goes on"
                    )

    def end(self) -> None:
        """The step is over: what it has left is shown, and the next one begins with it."""
        groups = self._groups()
        for (kind, number, key), value in self._after.items():
            there = groups[number] if kind == "group" else self.attributes if kind == "attribute" else self.state
            there[key] = value
        self.drop()

    def drop(self) -> None:
        """The step has failed, or is not to count: what it has left is forgotten."""
        self._after.clear()
        self._unsure.clear()
        self.seen.clear()
        self._given.clear()
        self.begun = False

    def saved(self) -> dict[str, Any]:
        """What a state dict is to have beside its state and groups: attributes, where steps change any."""
        return {ATTRIBUTES: dict(self.attributes)} if self.attributes else {}

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what a state dict has, of plain PyTorch's or of `saved`; the groups are the caller's."""
        self.drop()
        self.attributes = copied({**self.attributes, **state_dict.get(ATTRIBUTES, {})})
        self.state = {k: copied(v) for k, v in state_dict["state"].items() if not isinstance(k, int)}

    def _note(self, place: Place, value: Any, unsure: bool) -> None:
        known = self._after.get(place, _NOTHING)
        if known is _NOTHING or (place in self._unsure and not unsure):
            self._after[place] = value
            (self._unsure.add if unsure else self._unsure.discard)(place)
        elif not unsure and not same(known, value):
            kind, number, key = place
            where = {"group": f"param_groups[{number}][{key!r}]", "attribute": f"its attribute {key}"}
            raise GradientError(
                f"{self._name} writes {where.get(kind, f'state[{key!r}]')} in each step, and another value for other "
                "tensors: it looks across tensors, while a streamed model is updated part by part. Instead: make it "
                f"yourself, {self._name}(model.parameters(), ...), which steps all tensors at once, its state in memory"
            )


def _other(now: Mapping[str, Any], before: Collection[Any]) -> bool:
    """Whether any value is another object than it was."""
    return len(now) != len(before) or any(map(is_not, now.values(), before))


def copied(value: Any) -> Any:
    """A deep copy; the object itself where that cannot be copied, and of modules and functions."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(one) for key, one in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(copied, value))
    if value is None or isinstance(value, int | float | str | torch.nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # a generator, a lock, a tensor with history
        return value


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit where they are tensors."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        if bool(one == other) or (one != one and other != other):
            return True
    except Exception:  # of no truth value, as NumPy's arrays
        return repr(one) == repr(other)
    return type(one).__module__ != "builtins" and hasattr(one, "__dict__") and same(vars(one), vars(other))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return torch.equal(one, other)
    if torch.equal(one, other):
        return True
    wide = one.is_floating_point() or one.is_complex()
    return wide and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
