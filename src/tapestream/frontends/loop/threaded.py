"""State that a step keeps in attributes and buffers (a membrane potential), threaded through the loop's state."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from tapestream.capture.buffers import Slot, buffer_slots, held, put
from tapestream.capture.snapshot import Snapshot
from tapestream.costs import Budget
from tapestream.errors import BudgetError, GradientError
from tapestream.executor.loop.sweep import paired
from tapestream.frontends.loop.call import Task
from tapestream.frontends.loop.inputs import Feed
from tapestream.frontends.loop.known import KnownSteps
from tapestream.frontends.others import beside_others
from tapestream.planning.plan import Plan
from tapestream.planning.repeating import KeepsState
from tapestream.runner.ambient import HostGenerators, TorchGenerators
from tapestream.runner.belongings import Belongings, place_of, undo
from tapestream.runner.stage import Stage
from tapestream.runner.state import storages

_MOST_KNOWN = 16


class Looped(Protocol):
    """A `Loop`."""

    _stage: Stage
    _known: KnownSteps
    _compiler: Any
    _given: Plan | None
    verify: bool
    budget: Budget
    plan: Plan | None

    def __call__(self, state: Any, steps: int | None, *, inputs: Any, outputs: Any) -> Any:
        """Runs it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step keeps a tensor: a dictionary (of attributes, of buffers), and the name there. ``slot``: the buffer,
    if it is one."""

    holder: dict[Any, Any]
    name: Any
    slot: Slot | None = None

    @property
    def key(self) -> tuple[int, Any]:
        """Equal for one place."""
        return id(self.holder), self.name


class FirstTape:
    """What the first step saves for its backward, counted: it stays until then, beside what the loop takes. ``given``:
    tensors that are others'."""

    def __init__(self, given: Iterable[Any]) -> None:
        self._others = storages([one for one in given if isinstance(one, torch.Tensor)])
        self._saved: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Each storage once."""
        return sum(self._saved.values())

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """For `saved_tensors_hooks`."""
        found = storages([tensor])
        self._saved |= {address: nbytes for address, nbytes in found.items() if address not in self._others}
        return tensor.detach(), tensor._version


def unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """See `FirstTape.pack`. Raises GradientError where it was written into, which hooks leave to us to look for."""
    tensor, version = saved
    if tensor._version != version:
        raise GradientError(
            f"Loop: a tensor of shape {tuple(tensor.shape)} that the first step's backward needs was modified by an "
            "inplace operation after it had been saved; clone() it before"
        )
    return tensor


class Threads:
    """Runs a loop that was refused as its step finds what the one before has left.

    The first step runs as in plain PyTorch: it may find nothing yet (a number, a buffer without elements), and it shows
    where the step keeps tensors. From then on these are a part of the state.
    """

    def __init__(self, loop: Looped, refused: KeepsState) -> None:
        self.loop, self.refused = loop, refused
        self.tape = FirstTape(())
        self.put_back: Callable[[], None] = _nothing  # lets all be as before the first step

    def run(self, task: Task, inputs: Any, outputs: Any, every: int, count: int | None, until: Any) -> Any:
        """What the loop returns. Raises the refusal where it cannot be told what is kept, or with options that would
        need the first step's output."""
        rest = _after_first(inputs)
        loop = self.loop
        wants_first = outputs not in (None, "stack") or every != 1 or until is not None or rest is _NOT_KNOWN
        is_set = loop._compiler is not None or loop._given is not None or loop._known.of_pairs
        if wants_first or is_set or count is None:
            raise self.refused
        with_output = outputs is not None
        found, places = self._first(task)
        loop._known.keeps = self.refused
        state, output = paired(found, 0) if with_output else (found, None)
        task.body.form.check(state, 0)
        rows = None
        if count > 1:
            state, rows = self._others(state, places, rest, outputs, count - 1)
        if not with_output:
            return state
        return state, _joined(output, rows)

    def _first(self, task: Task) -> tuple[Any, list[Place]]:
        stage = self.loop._stage
        before, buffers = Belongings(stage.modules, stage.function), _buffers_of(stage.modules)
        snapshot, torchs, hosts = Snapshot.of(stage.modules), TorchGenerators.capture(), HostGenerators.capture()
        inputs = Feed.of(task.source, 0).given()
        self.tape = FirstTape([*task.body.form.leaves(task.state), *tree_leaves(inputs), *stage.parameters()])
        with saved_tensors_hooks(self.tape.pack, unpack):
            found = stage.function(task.state, *inputs)
        after = Belongings(stage.modules, stage.function, before)
        changes = [*before.changes(after), *before.replaced(after)]

        def put_back() -> None:
            undo(changes)
            for slot, value in buffers:
                put(slot, value)
            snapshot.put_back()
            torchs.restore()
            hosts.restore()

        self.put_back = put_back
        slots = [slot for slot, value in buffers if held(slot) is not value]
        places = [Place(slot[0]._buffers, slot[1], slot) for slot in slots]
        for change in changes:
            if before.has_number(change):
                continue
            named = isinstance(change.holder, dict) or (
                isinstance(change.holder, nn.Module) and isinstance(change.key, str)
            )
            if not (named and isinstance(change.now(), torch.Tensor)):
                self.put_back()
                raise self.refused
            places.append(Place(*place_of(change.holder, change.key)))
        if not places:
            self.put_back()
            raise self.refused
        return found, list({place.key: place for place in places}.values())

    def _others(self, state: Any, places: list[Place], inputs: Any, outputs: Any, count: int) -> tuple[Any, Any]:
        kept = tuple(place.holder[place.name] for place in places)
        loop = self._child(places, with_output=outputs is not None)
        for place, tensor in zip(places, kept, strict=True):
            place.holder[place.name] = tensor.detach()  # without its graph: the loop is given that as its state
        held, whole = self.tape.nbytes, self.loop.budget
        if whole.device_nbytes is not None:
            loop.budget = whole.with_device(max(1, whole.device_nbytes - held))
        try:
            with beside_others("Loop", held, whole):
                found = loop((state, kept), count, inputs=inputs, outputs=outputs)
        except BudgetError:
            self.put_back()
            raise
        finally:
            self.loop.plan = loop.plan
        (state, kept), rows = found if outputs is not None else (found, None)
        for place, tensor in zip(places, kept, strict=True):
            place.holder[place.name] = tensor
        return state, rows

    def _child(self, places: list[Place], *, with_output: bool) -> Looped:
        """The same loop with another step, made once."""
        known, key = self.loop._known.threaded, (*(place.key for place in places), with_output)
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            child = copy.copy(self.loop)
            child._stage = Stage(0, threaded(self.loop._stage.function, places, with_output=with_output))
            child._stage.stills.threaded = tuple(place.slot for place in places if place.slot is not None)
            child._stage.reaches(self.loop._stage.modules)
            child._known = KnownSteps(child._stage, verify=child.verify)
            child._known.of_pairs = True
            known[key] = child
        found: Looped = known[key]
        return found


def looked_or_threaded(
    loop: Looped, task: Task, inputs: Any, outputs: Any, every: int, count: int | None, until: Any
) -> Task | tuple[Any]:
    """The task with what a look at its steps shows; what the loop returns, in a tuple, where these keep state. If they
    did in the last call, there is no look."""
    asked, keeps = (task, inputs, outputs, every, count, until), loop._known.keeps
    if keeps is not None:
        try:
            return (Threads(loop, keeps).run(*asked),)
        except KeepsState as refused:
            if refused is not keeps:
                raise
            loop._known.keeps = None  # nothing has changed
    try:
        return loop._known.looked(task, count, until)
    except KeepsState as refused:
        return (Threads(loop, refused).run(*asked),)


def threaded(step: Callable[..., Any], places: Sequence[Place], *, with_output: bool) -> Callable[..., Any]:
    """The step of a pair: its own state, and what it keeps."""

    def threaded_step(state: Any, *given: Any) -> Any:
        own, kept = state
        before = [place.holder[place.name] for place in places]
        try:
            for place, tensor in zip(places, kept, strict=True):
                place.holder[place.name] = tensor
            found = step(own, *given)
            after = tuple(place.holder[place.name] for place in places)
        finally:
            for place, value in zip(places, before, strict=True):
                place.holder[place.name] = value
        if not with_output:
            return found, after
        own, output = paired(found, 0)
        return (own, after), output

    threaded_step.__name__ = getattr(step, "__name__", type(step).__name__)
    return threaded_step


def _buffers_of(modules: Sequence[nn.Module]) -> list[tuple[Slot, torch.Tensor]]:
    pairs = [(slot, held(slot)) for slot in buffer_slots(modules)]
    return [(slot, value) for slot, value in pairs if isinstance(value, torch.Tensor)]


def _nothing() -> None:
    """Before the first step there is nothing to put back."""


_NOT_KNOWN = object()


def _after_first(inputs: Any) -> Any:
    """The inputs of the steps after the first."""
    if inputs is None or isinstance(inputs, range):
        return inputs and inputs[1:]
    if isinstance(inputs, torch.Tensor):
        return _NOT_KNOWN if inputs.requires_grad else inputs[1:]
    if callable(inputs):
        return lambda number: inputs(number + 1)
    return inputs[1:]


def _joined(first: Any, rows: Any) -> Any:
    """The stack of all outputs."""
    return tree_map(
        lambda one, others: one[None] if others is None else torch.cat([one[None], others]),
        first,
        tree_map(lambda _: None, first) if rows is None else rows,
    )
