"""A block's call taken apart: which tensors are the chain's state, what is bound to this call, what comes out."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.accelerator.memory import storage_nbytes
from tapestream.errors import InputError
from tapestream.frontends.module.observing.hooks import Captured, capturing, hooked
from tapestream.frontends.module.observing.passing import Passing
from tapestream.runner.ambient import recomputing
from tapestream.runner.private import Before, detached, may_change, standing_in, take_over, tensors_in
from tapestream.runner.state import State, take_apart
from tapestream.runner.trees import is_instance, tree_flatten

Current: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Opens: TypeAlias = Callable[[Any], tuple[list[Any], pytree.TreeSpec]]


class ChangedContainer(InputError):
    """A block has put something into a list or dictionary, where it got one of its own."""


@dataclass(frozen=True, slots=True)
class Link:
    """What the block before left behind, and what the caller holds of it.

    ``tensors``: the entries of the state (its distinct tensors), as they enter the next block's node; ``slots``: which
    of them lies at each place of the flat tuple that the block before returned (what it returns and hooks have seen
    too is there twice). ``sides``: entries that every block of
    the chain hands on (an encoder's output, say), so that their gradients are added in the order of plain autograd.
    ``names``: by ``id`` of a tensor that the caller holds: its entry, itself, and its version when it was handed out.
    """

    tensors: tuple[torch.Tensor, ...] = ()
    slots: tuple[int, ...] = ()
    sides: tuple[int, ...] = ()
    names: dict[int, tuple[int, torch.Tensor, int]] = field(default_factory=dict)

    def entry(self, tensor: torch.Tensor) -> int | None:
        """Which entry of the state ``tensor`` is, None when it is none, or was changed in place since."""
        found = self.names.get(id(tensor))
        return None if found is None or tensor._version != found[2] else found[0]

    def sides_held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that the caller holds of what every block hands on, each with what it is by now."""
        held = (t for entry, t, version in self.names.values() if entry in self.sides and t._version == version)
        return [(t, now) for t in held if (now := self.tensors[self.names[id(t)][0]]) is not t and now.requires_grad]


class BlockRun:
    """One call of a block as a function from state to state: a flat tuple of tensors each.

    ``linked``: everything that carries a gradient came from the block before. ``tensors``: the state's, with their
    graph. Objects that the block may change (key-value caches) are its own in every run but the first; ``writes``:
    it has written into tensors in them. With ``passes`` they are in that one, too, so that gradients flow through what
    is in them; containers count as such objects then.
    """

    def __init__(
        self,
        name: str,
        original: Callable[..., Any],
        modules: Sequence[nn.Module],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        link: Link,
        current: Current | None = None,
        *,
        passes: bool = False,
    ) -> None:
        """``current``: what stands for a tensor by now that comes from elsewhere (None: itself)."""
        self.name = name
        self._original, self._hooked = original, hooked(modules)
        leaves, self._spec, self._opens = _taken_apart(args, kwargs, link, passes=passes)
        self._opened = not passes and any(_holds_container(value) for value in (*args, *kwargs.values()))
        self._changing = [at for at, leaf in enumerate(leaves) if may_change(leaf)]
        self._passing = Passing(name, [leaves[at] for at in self._changing]) if passes else None
        inside = [] if self._passing is None else self._passing.tensors
        self.linked, here, picks = _recognised(name, [*leaves, *inside], link, current)
        self._picks = {at: entry for at, entry in picks.items() if at < len(leaves)}
        self._inside = [picks[len(leaves) + number] for number in range(len(inside))]
        self.tensors, self._slots, self._sides, self._names = here.tensors, here.slots, here.sides, here.names
        self._places = tuple(here.slots.index(entry) for entry in range(len(here.tensors)))
        for at in self._picks:
            leaves[at] = None  # the call's function lives until its backward and must not keep the state
        self._leaves = leaves
        if passes:  # what is in them is in the state
            self._leaves = [leaf if at not in self._changing else None for at, leaf in enumerate(leaves)]
        self._stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.things = [leaves[at] for at in self._changing]  # the caller's, until `finish`
        self._changed: list[Any] = []
        self._before: Before | None = None
        self._clone = self.writes = False
        self._first = True
        self._template: State | None = None
        self._captured: Captured | None = None
        self._inner: tuple[torch.Tensor, ...] = ()
        self._left = 0

    @property
    def held(self) -> list[torch.Tensor]:
        """Tensors beside the state that the call's function needs, and holds, until its backward."""
        return tensors_in(self._leaves)

    @property
    def used(self) -> dict[int, list[torch.Tensor]]:
        """Entries of the state that carry a gradient and that the block does not hand on, and what the caller holds of
        each."""
        mine = [e for e, t in enumerate(self.tensors) if t.requires_grad and e not in self._sides]
        return {entry: self.held_of.get(entry, []) for entry in mine}

    @property
    def held_of(self) -> dict[int, list[torch.Tensor]]:
        """What the caller holds of each entry of the state."""
        found: dict[int, list[torch.Tensor]] = {}
        for entry, tensor, version in self._names.values():
            if tensor._version == version:
                found.setdefault(entry, []).append(tensor)
        return found

    @property
    def entries(self) -> frozenset[int]:
        """Entries of the state that the block is given, or hands on."""
        return frozenset((*self._picks.values(), *self._inside, *self._sides))

    @property
    def flat(self) -> tuple[torch.Tensor, ...]:
        """The state as the block before returned it, or its tensors where this is the first: what a call takes."""
        return tuple(self.tensors[entry] for entry in self._slots)

    @property
    def inside(self) -> list[torch.Tensor]:
        """Tensors of its state that are in objects."""
        return [] if self._passing is None else self._passing.tensors

    def passed(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the block has used, if it has given gradients to ``leaves`` in an observed run."""
        reached = set(map(id, leaves))
        return [t for t, stand_in in self._stand_ins if id(stand_in) in reached]

    def keep_arguments(self, *, clone: bool, graph: bool = True) -> None:
        """The block will run again: remember objects among its arguments as they are now; tensors in them with the
        ``graph`` in which others have left them, so that a gradient through one of them is refused and not lost."""
        self._clone = clone
        if self._passing is not None:
            self._passing.keep(clone=clone)
        elif self._changing:
            things: Sequence[Any] = [self._leaves[at] for at in self._changing]
            if not graph:
                things, self._stand_ins = standing_in(things, clone=clone)
            self._before = Before.take(things, clone=clone and graph)

    def __call__(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Run the block: its output tensors, what hooks are to see, what it leaves in objects, and what it hands on."""
        leaves = list(self._leaves)
        for at, entry in self._picks.items():
            leaves[at] = state[self._places[entry]]
        inside, pairs = [state[self._places[entry]] for entry in self._inside], list[Any]()
        given = [] if not self._changing else self._given(leaves, inside, pairs)
        held = [(t, t._version) for t in tensors_in(given)]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        with capturing(self._hooked) as captured:
            out = self._original(*args, **kwargs)
        if self._opened:
            self._check_containers((args, kwargs), leaves)
        self.writes = self.writes or any(t._version != version for t, version in held)
        found, live = take_apart(out, lambda instance: all(instance is not one for one in given))
        left: Sequence[torch.Tensor] = ()
        if self._passing is not None:
            left = self._passing.left(given, pairs, inside, held)
        if self._first:
            self._template = State((), found.requires, found.others, found.slots, found.spec)
            self._captured, self._inner, self._left = captured, state, len(left)
            if self._passing is None and recomputing() and not self._changed:
                own = tensors_in(self.things) if len(held) else []
                same = zip(held, own, strict=True) if len(own) == len(held) else ()
                known = {id(t): caller for (t, version), caller in same if t._version == version}
                self._changed = list(detached(given, known))  # a later run must not free the tensors of this one
        return (*live, *captured.tensors, *left, *(state[self._places[entry]] for entry in self._sides))

    def _given(self, leaves: list[Any], inside: Sequence[torch.Tensor], pairs: list[Any]) -> list[Any]:
        """The objects that a run is given, put into ``leaves``; with ``pairs`` of the caller's and these."""
        copied: Sequence[Any] | None = None
        if self._passing is not None:
            copied, found = self._passing.copies(inside, again=recomputing(), clone=self._clone)
            pairs.extend(found)
        elif recomputing() and self._before is not None:
            copied = self._before.copies(self.name, clone=self._clone)
        for at, one in zip(self._changing, copied or (), strict=copied is not None):
            leaves[at] = one
        return [leaves[at] for at in self._changing]

    def _check_containers(self, given: Any, before: list[Any]) -> None:
        """Raise ChangedContainer where the block has put something into a list or dictionary: it got one of its own."""
        after, spec = tree_flatten(given, lambda instance: all(instance is not leaf for leaf in before))
        if spec != self._spec or any(now is not was for now, was in zip(after, before, strict=True)):
            raise ChangedContainer(
                f"{self.name} changes a list, dictionary or dataclass that it is given (an append, an item set), which "
                "it did not do when it was profiled; return the new content instead"
            )

    def finish(self, state: State, outputs: Sequence[torch.Tensor]) -> tuple[Any, Link]:
        """After the first run, which gave ``state``: what the caller gets, made of ``outputs``, and the next link."""
        template, captured = self._template, self._captured
        assert template is not None
        assert captured is not None
        outer = {id(self._inner[place]): t for place, t in zip(self._places, self.tensors, strict=True)}
        inner, names_before = self._inner, self._names
        self._inner, self._names, self.tensors = (), {}, ()
        self._first, self._template, self._captured, self._changed, self.things = False, None, None, [], []
        flat = [outputs[slot] for slot in state.slots]
        own, shown, left = len(template.requires), len(captured.tensors), self._left
        seen = set(state.slots[: own + shown + left])  # others are handed on, and nobody holds them
        names = {id(t): (entry, t, t._version) for entry, t in enumerate(outputs) if entry in seen}
        for number, entry in enumerate(self._sides):
            now = state.slots[own + shown + left + number]
            names.update({key: (now, t, version) for key, (was, t, version) in names_before.items() if was == entry})
        sides = tuple(state.slots[own + shown + left :])
        if self._passing is not None:
            self._passing.show(flat[own + shown : own + shown + left])
        captured.show(flat[own : own + shown], outer, self.name, flat[:own])
        del inner  # until here, or an id in ``outer`` might be another tensor's
        return template.tree(flat[:own]), Link(tuple(outputs), tuple(state.slots), sides, names)

    def following(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], link: Link
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of this call with what the block has made of its state in place of that: what a next block of
        the same kind would be given."""
        leaves, spec = self._opens((args, kwargs))
        for at, entry in self._picks.items():
            if entry not in self._sides and entry < len(link.tensors):
                leaves[at] = link.tensors[entry]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    def take_over(self) -> int:
        """After a run on private copies: let the caller's objects have what it did to them.

        Returns the bytes of tensors that they hold now and did not before.
        """
        if self._passing is not None:
            return 0  # they are in the state, and counted there
        held = _nbytes([self._leaves[at] for at in self._changing])
        for at, changed in zip(self._changing, self._changed, strict=True):
            take_over(self._leaves[at], changed)
        return max(0, _nbytes([self._leaves[at] for at in self._changing]) - held)


def _holds_container(value: Any) -> bool:
    """Whether it is, or holds in tuples, what is taken apart for each run and can be changed."""
    if isinstance(value, tuple):
        return any(map(_holds_container, value))
    return isinstance(value, (list, dict, deque)) or is_instance(value)


def _taken_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], link: Link, *, passes: bool
) -> tuple[list[Any], pytree.TreeSpec, Opens]:
    """Leaves of a call's arguments, their structure, and what takes others like them apart. Dataclasses are taken apart
    of which the block before has returned a tensor, frozen ones, and all where there is no other tensor. Others are
    objects that the block may change (a cache), as are containers with ``passes``."""
    if passes:
        opens = _opens_tuples
        return *opens((args, kwargs)), opens
    apart: set[int] = set()
    alone = not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs)))

    def opened(instance: Any) -> bool:
        frozen = type(instance).__dataclass_params__.frozen
        if alone or frozen or any(link.entry(t) is not None for t in tensors_in([instance])):
            apart.add(id(instance))
        return id(instance) in apart

    found = tree_flatten((args, kwargs), opened)
    return *found, lambda tree: tree_flatten(tree, lambda instance: id(instance) in apart)


def _opens_tuples(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    _, kwargs = tree
    return pytree.tree_flatten(tree, lambda one: one is not kwargs and isinstance(one, (list, dict, deque)))


def _nbytes(things: Sequence[Any]) -> int:
    storages = (t.untyped_storage() for t in tensors_in(things))
    return sum({storage.data_ptr(): storage_nbytes(storage) for storage in storages}.values())


def entering(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The state of a block that is called with ``tensors``, and does not go on from the one before: the first of them
    that may carry a gradient, and those that do."""
    main = next((t for t in tensors if t.is_floating_point() or t.is_complex()), tensors[0])
    return list({id(t): t for t in (main, *(t for t in tensors if t.requires_grad))}.values())


def _recognised(
    name: str, leaves: Sequence[Any], link: Link, current: Current | None
) -> tuple[bool, Link, dict[int, int]]:
    """(whether the call goes on from ``link``, the state that it enters with, which argument is which entry)."""
    tensors = [(at, leaf) for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise InputError(f"{name} was called without any tensor; pass its state as an argument")
    known = {at: entry for at, t in tensors if (entry := link.entry(t)) is not None}
    if known and all(at in known for at, t in tensors if t.requires_grad):
        return True, link, known
    distinct = entering([t for _, t in tensors])
    number = {id(t): entry for entry, t in enumerate(distinct)}
    names = {id(t): (entry, t, t._version) for entry, t in enumerate(distinct)}
    picks = {at: number[id(t)] for at, t in tensors if id(t) in number}
    n = len(distinct)
    distinct = distinct if current is None else list(map(current, distinct))
    return False, Link(tuple(distinct), tuple(range(n)), tuple(range(1, n)), names), picks
