"""One watched step of a loop: what it writes, reaches and captures."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from tapestream.errors import InputError
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.stand_ins import Seen
from tapestream.executor.loop.sweep import NAME
from tapestream.frontends.loop.inputs import Feed
from tapestream.frontends.loop.reach import ends_of
from tapestream.runner.graph import next_sequence_number, root_of_graph, times_used, uses_of_leaves
from tapestream.runner.guards import Guard
from tapestream.runner.modes import as_a_stage
from tapestream.runner.state import replica, tensors_in

Mask = tuple[bool, ...]
Split = Callable[[Any, int], tuple[Any, Any]]
"""Parts what a step returned into state and output (None where there is none)."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What one step has shown; tuples go by leaf of the state. ``state`` and ``output`` have no graph."""

    state: Any
    output: Any
    requires: Mask
    output_requires: Mask
    mutates: frozenset[int]
    aliases: frozenset[tuple[int, int]]
    captured: list[torch.Tensor]
    calls_autograd: bool
    casts: frozenset[int]
    uncast: frozenset[int]
    repeated: frozenset[int]
    state_repeated: frozenset[int] = frozenset()
    leaves: list[torch.Tensor] = field(default_factory=list)
    makes_leaves: bool = False
    escapes: bool = False
    nodes: int = 1


def watch(
    step: Callable[..., Any], state: Any, requires: Mask, form: Form, feed: Feed, split: Split, number: int,
    around: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda copies: nullcontext(),
) -> Watched:  # fmt: skip
    """Run step ``number`` on copies of ``state``'s tensors, the step alone inside of ``around(copies)``. Raises
    InputError where it returns another form, or writes into its input."""
    observer = Observer()
    since = next_sequence_number()
    seen = Seen(since)
    seen.tensors += [t for t in form.leaves(state) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    root = root_of_graph()
    device = next((leaf.device for leaf in form.leaves(state) if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
    with as_a_stage(device):
        inside, fresh = copied(form, state, requires, root)
        seen.inputs = frozenset(map(id, fresh))
        before = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in form.leaves(inside)]
        entering = [leaf.grad_fn if isinstance(leaf, torch.Tensor) else None for leaf in form.leaves(inside)]
        with seen, around(fresh):
            found = observer.run(step, inside, partial(_fed, feed, root))
    nodes = next_sequence_number() - since
    result, reached = _found(
        found, form, split, number, since, seen, frozenset(id(t) for t in (root, *fresh)), entering
    )
    now = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in form.leaves(inside)]
    mutates = frozenset(i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    references = [weakref.ref(leaf) for leaf in reached]
    del reached, found, inside, fresh, seen, entering
    alive = [leaf for reference in references if (leaf := reference()) is not None]
    return replace(
        result, mutates=mutates, calls_autograd=observer.called, leaves=alive,
        makes_leaves=len(alive) < len(references), escapes=observer.something_lives(), nodes=nodes,
    )  # fmt: skip


def copied(form: Form, state: Any, requires: Mask, root: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """The state over bytes of its own (the step may write into them), and its tensors."""
    fresh: dict[int, torch.Tensor] = {}
    leaves = list(form.leaves(state))
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in fresh:
                copy = replica(leaf)
                if requires[i]:
                    copy = Guard.apply(root, copy, NAME)  # type: ignore[no-untyped-call]
                fresh[id(leaf)] = copy
            leaves[i] = fresh[id(leaf)]
    return form.build(leaves), list(fresh.values())


def _fed(feed: Feed, root: torch.Tensor) -> tuple[Any, ...]:
    return feed.given(lambda row: Guard.apply(root, row, NAME))  # type: ignore[no-untyped-call]


def _called(step: Callable[..., Any], state: Any, given: tuple[Any, ...]) -> Any:
    versions = [t._version for t in tensors_in(given)]
    found = step(state, *given)
    if versions != [t._version for t in tensors_in(given)]:
        raise InputError(
            "Loop: a step writes into its input (inputs=), which belongs to the caller and is given again when the "
            "step is recomputed; clone() it in the step first"
        )
    return found


def _found(
    found: Any,
    form: Form,
    split: Split,
    number: int,
    since: int,
    seen: Seen,
    own: frozenset[int],
    entering: Sequence[Node | None],
) -> tuple[Watched, list[torch.Tensor]]:
    after, output = split(found, number)
    form.check(after, number)
    output_form = Form.of(output, "output")
    live, out = list(form.leaves(after)), list(output_form.leaves(output))
    tensors = [t for t in (*live, *out) if isinstance(t, torch.Tensor)]
    reached, captured = ends_of(tensors, since, seen.tensors, own)
    uses = uses_of_leaves(tensors)
    first = {id(leaf): i for i, leaf in reversed(list(enumerate(live))) if isinstance(leaf, torch.Tensor)}
    aliases = frozenset((i, first[id(leaf)]) for i, leaf in enumerate(out) if id(leaf) in first)
    watched = Watched(
        form.build(_bare(live)), output_form.build(_bare(out)), requires_of(live), requires_of(out), frozenset(),
        aliases, captured, False, uses.casts, uses.uncast, uses.repeated,
        frozenset(i for i, times in enumerate(times_used(tensors, entering)) if times > 1),
    )  # fmt: skip
    return watched, reached


def requires_of(leaves: Sequence[Any]) -> Mask:
    """Which leaves carry a gradient."""
    return tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _bare(leaves: Sequence[Any]) -> list[Any]:
    bare: dict[int, Any] = {}
    for leaf in leaves:
        bare.setdefault(id(leaf), leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return [bare[id(leaf)] for leaf in leaves]


class Observer:
    """Saved-tensor hooks that notice an unpack before the step has ended, and a graph that outlives it."""

    def __init__(self) -> None:
        self.inside, self.called = True, False
        self._packed: list[weakref.ref[_Saved]] = []

    def run(self, step: Callable[..., Any], state: Any, given: Callable[[], tuple[Any, ...]]) -> Any:
        """One step under observation, or without where it uses torch.func, which refuses to run under hooks."""
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                return _called(step, state, given())
        except RuntimeError as error:
            if "hooks" not in str(error):
                raise
            self.called = True
            return _called(step, state, given())
        finally:
            self.inside = False

    def _pack(self, tensor: torch.Tensor) -> "_Saved":
        saved = _Saved(tensor.detach())  # with its graph, a saved output would keep that graph alive for ever
        self._packed.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: "_Saved") -> torch.Tensor:
        self.called = self.called or self.inside
        return saved.tensor

    def something_lives(self) -> bool:
        """True when a tensor made inside was stored outside with its graph."""
        return any(reference() is not None for reference in self._packed)


class _Saved:
    """One saved tensor, watched."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
