"""`Rule`: applies a torch optimizer to blocks, their state in the bytes that the schedule has brought."""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeAlias

import torch

from tapestream.errors import GradientError
from tapestream.executor.updates import PartUpdate
from tapestream.optim.inner import Inner
from tapestream.storage.blocks import Piece

Groups: TypeAlias = Callable[[], Sequence[Mapping[str, Any]]]
MASTER = "master"


def _references() -> int:
    """What Python counts for a value of a dict that is looked at."""
    return max(sys.getrefcount(value) for found in ({"": object()},) for value in found.values())


_KEPT = _references()


@dataclass(slots=True)
class _Entry:
    """A parameter, or the ``piece`` of one that is number ``number`` of its part, to be updated: ``key`` is what it is
    known by, ``bytes`` are its own, ``target`` is what the optimizer sees of ``memory``."""

    parameter: torch.Tensor
    key: tuple[int, int]
    number: int
    piece: Piece
    bytes: torch.Tensor
    gradient: torch.Tensor
    places: "_Places"
    target: torch.Tensor | None = None
    memory: torch.Tensor | None = None
    _states: dict[str, torch.Tensor] | None = None

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """The places of its state, by name."""
        if self._states is None:
            self._states = self.places.of(self.number)
        return self._states


class _Places:
    """The places of a part's state, which are asked for when something is to be there: a first update makes state of
    its own, and needs them beside that only when its temporaries are gone."""

    def __init__(self, update: PartUpdate) -> None:
        self._update = update
        self._found: dict[int, dict[str, torch.Tensor]] | None = None

    def of(self, number: int) -> dict[str, torch.Tensor]:
        """By name, for a piece of the part."""
        if self._found is None:
            self._found = defaultdict(dict)
            slots = () if self._update.part is None else self._update.part.slots
            for (piece, name), view in zip(slots, self._update.views(), strict=True):
                self._found[piece][name] = view
        return self._found[number]


@dataclass(slots=True)
class _Known:
    """What a rule knows of parameters and pieces, wherever they are updated. ``updated``: whether anything was, since
    somebody set this to False; ``scalars``: per parameter id, what is not streamed (Adam's step); ``before``: the same
    as it was before the first piece was updated; ``created``: pieces that have state."""

    updated: bool = False
    scalars: dict[int, dict[str, Any]] = field(default_factory=dict)
    before: dict[int, dict[str, Any]] = field(default_factory=dict)
    created: set[tuple[int, int]] = field(default_factory=set)
    group_of: dict[int, int] = field(default_factory=dict)


class Rule:
    """The optimizer's rule for every block.

    ``groups()`` gives the param_groups as they are now, so that learning-rate schedulers work. 16-bit parameters in
    ``masters`` (ids) are updated through an fp32 copy that lies beside their state. ``other``: the rule for blocks that
    are updated elsewhere; what the two know is one.
    """

    def __init__(self, inner: Inner, groups: Groups, masters: Container[int], other: "Rule | None" = None) -> None:
        self._inner, self._groups, self._masters = inner, groups, masters
        self._known: _Known = _Known() if other is None else other._known
        self.scalars, self._before = self._known.scalars, self._known.before
        self._created, self._group_of = self._known.created, self._known.group_of

    @property
    def updated(self) -> bool:
        """Whether anything was updated since somebody set this to False."""
        return self._known.updated

    @updated.setter
    def updated(self, updated: bool) -> None:
        self._known.updated = updated

    def run(self, work: Sequence[PartUpdate]) -> None:
        """Update what the parts cover of parameters that are the optimizer's and have a gradient, in place, and their
        state in its views."""
        if not self._group_of:
            self._group_of.update({id(p): g for g, group in enumerate(self._groups()) for p in group["params"]})
        # All at once costs no temporaries where they are those of one tensor, unless gradients are cast for masters.
        at_once = self._tensor_by_tensor(work) and not self._masters
        for together in [work] if at_once else [[part] for part in work]:
            entries = [entry for part in together for entry in self._entries(part)]
            for some in self._at_once([entry for entry in entries if entry.key in self._created]):
                self._step(some)
            # The first step makes the state itself: one tensor at a time, so that only one is held twice, and the
            # largest while there is no room for all of it yet.
            new = [entry for entry in entries if entry.key not in self._created]
            for entry in sorted(new, key=lambda entry: -entry.piece.elements):
                self._step([entry])

    def regroup(self) -> None:
        """The groups have other parameters now."""
        self._group_of.clear()

    def _at_once(self, entries: list[_Entry]) -> Iterator[list[_Entry]]:
        """All entries; where the optimizer makes its state anew, which lies beside the old one until it is put away,
        so many that theirs is no larger than the largest of one."""
        if not self._inner.replaces:
            yield entries
            return
        sizes = [sum(view.nbytes for view in entry.states.values()) for entry in entries]
        some: list[_Entry] = []
        held = 0
        for entry, nbytes in zip(entries, sizes, strict=True):
            if some and held + nbytes > max(sizes):
                yield some
                some, held = [], 0
            some.append(entry)
            held += nbytes
        yield some

    def restored(self, parameter: torch.Tensor, scalars: dict[str, Any], pieces: Sequence[Piece]) -> None:
        """A saved state was written to the home of all the parameter's pieces."""
        self._created.update((id(parameter), piece.start) for piece in pieces)
        self.scalars[id(parameter)] = scalars

    def forget(self) -> None:
        """Nothing has been updated yet."""
        self.updated = False
        self._created.clear()
        self.scalars.clear()

    def are_alone(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether nobody else has the tensors that are kept of their state beside what is streamed (Adam's step)."""
        kept = (self.scalars.get(id(parameter), {}) for parameter in parameters)
        held = (sys.getrefcount(value) > _KEPT for found in kept for value in found.values() if torch.is_tensor(value))
        return not any(held)

    def _tensor_by_tensor(self, work: Sequence[PartUpdate]) -> bool:
        """Whether the optimizer's temporaries are those of one tensor, be there many or few: not in its foreach form,
        which is the default on a GPU."""
        on_cpu = all(gradient.is_cpu for part in work for gradient in part.gradients.values())
        return all(group.get("fused") or (on_cpu and not group.get("foreach")) for group in self._groups())

    @torch.no_grad()
    def _entries(self, update: PartUpdate) -> list[_Entry]:
        block, part, found, places = update.block, update.part, list[_Entry](), _Places(update)
        for number, piece in enumerate(() if part is None else part.pieces):
            parameter = block.parameters[piece.number]
            key = id(parameter), piece.start
            if piece.number in update.gradients and key[0] in self._group_of:
                own, given = update.tensors(piece)
                found.append(_Entry(parameter, key, number, piece, own, given, places))
        return found

    @torch.no_grad()
    def _step(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        self.updated = True
        try:
            for entry in entries:
                self._aim(entry)
            self._optimize(entries)
        finally:
            for entry in entries:
                if entry.target is not None:
                    entry.target.grad = None
        for entry in entries:
            assert entry.target is not None
            assert entry.memory is not None
            self._inner.put_back(entry.target, entry.memory)
            if id(entry.parameter) in self._masters:
                entry.bytes.copy_(entry.target)
                if entry.key not in self._created:
                    entry.states[MASTER].copy_(entry.target)
            entry.target = entry.memory = (
                None  # one that was made for this step must not outlast it beside the next one's
            )
            self._created.add(entry.key)

    def _aim(self, entry: _Entry) -> None:
        """What the optimizer is to see: the parameter's bytes, or its master, with the gradient."""
        memory, gradient = entry.bytes, entry.gradient
        if id(entry.parameter) in self._masters:
            if entry.key in self._created:
                memory = entry.states[MASTER]
            else:
                memory = torch.empty(memory.shape, dtype=torch.float32, device=memory.device).copy_(memory)
            gradient = gradient.to(memory.dtype)
        entry.memory, entry.target = memory, self._inner.target(memory)
        entry.target.grad = gradient

    def _optimize(self, entries: Sequence[_Entry]) -> None:
        members: dict[int, list[Any]] = {}
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        given: list[dict[str, Any] | None] = []
        for entry in entries:
            members.setdefault(self._group_of[entry.key[0]], []).append(entry.target)
            shown: dict[str, Any] | None = None
            if entry.key in self._created:
                assert entry.target is not None
                shown = {**self._scalars_for(entry), **entry.states}
                shown.pop(MASTER, None)
                state[entry.target] = shown.copy()
            given.append(shown)
        self._inner.step(self._groups(), members, state)
        for entry, shown in zip(entries, given, strict=True):
            assert entry.target is not None
            entry.target.grad = None  # a cast of it would take room beside the state
            made = state.get(entry.target, {})
            if shown is None or made.keys() != shown.keys() or not all(map(is_, made.values(), shown.values())):
                self._put_away(entry, made)

    def _scalars_for(self, entry: _Entry) -> dict[str, Any]:
        """What is not streamed, for one step: a parameter's own with its first piece, so that it steps once; the others
        get copies of what that was before."""
        key, piece = id(entry.parameter), entry.piece
        if piece.whole:
            return self.scalars[key]
        if piece.first:
            self._before[key] = copy.deepcopy(self.scalars[key])
            return self.scalars[key]
        return copy.deepcopy(self._before[key])

    def _put_away(self, entry: _Entry, made: Mapping[str, Any]) -> None:
        """State that the optimizer made goes to its places; the rest are scalars."""
        scalars = {}
        places = entry.states if made else {}
        for name, value in made.items():
            view = places.get(name)
            if view is None:
                scalars[name] = value
            elif value is not view and value.data_ptr() != view.data_ptr():
                if value.shape != view.shape:
                    raise GradientError(
                        f"an optimizer's state {name!r} had the shape {tuple(view.shape)} after its first step and "
                        f"has {tuple(value.shape)} now; a streamed model's optimizer keeps its state in places of one "
                        "size: make it yourself, of all parameters, its state in memory, or use another, such as AdamW"
                    )
                view.copy_(value)
        if not entry.piece.first:
            return
        known = self.scalars.get(id(entry.parameter))
        if known is None or known.keys() != scalars.keys() or any(known[k] is not v for k, v in scalars.items()):
            self.scalars[id(entry.parameter)] = scalars  # otherwise the same object shows that nothing is new
