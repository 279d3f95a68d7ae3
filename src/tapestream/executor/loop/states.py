"""`ParcelStates`: restart checkpoints of a loop on their way to a slower tier and back."""

from dataclasses import replace

import numpy
import torch

from tapestream.errors import ScheduleError
from tapestream.executor.loop.form import ARRAYS, Form
from tapestream.executor.loop.keep import Kept, versions
from tapestream.executor.travel.parcel import Parcels
from tapestream.ir.actions import Kind, Tier, Value


class ParcelStates:
    """See `StageMover`. Buffers travel with the state's tensors, and so do states of generators that have changed
    since the first: of a program that draws nothing, all are one. ``kept``: the engine's."""

    def __init__(self, parcels: Parcels, form: Form) -> None:
        self._parcels, self._form = parcels, form
        self.kept: dict[int, Kept] = {}
        self._unchanged: torch.Tensor | None = None
        self._rest: dict[int, Kept] = {}

    def holds(self, value: Value) -> bool:
        """See `StageMover`."""
        return self._parcels.holds(value)

    def start(self, value: Value, source: Tier, target: Tier) -> None:
        """Start a copy of a restart checkpoint. Raises StorageError or BudgetError where ``target`` is full."""
        stage = _stage_of(value)
        if source is Tier.DEVICE:
            item = self.kept[stage] = _aligned(self.kept[stage], self._form)
            generators = item.torch_generators
            if self._unchanged is None and generators is not None:
                self._unchanged = generators.cpu
            drawn = generators is not None and generators.cpu is not self._unchanged
            self._parcels.pack(value, _tensors(item, self._form, drawn))
            self._rest[stage] = _without(item, self._form, drawn)
        self._parcels.start(value, source, target)

    def wait(self, value: Value, tier: Tier) -> None:
        """Until the copy is there; on DEVICE it is a restart checkpoint again. Raises StorageError if it failed."""
        stage = _stage_of(value)
        self._parcels.wait(value, tier)
        if tier is Tier.DEVICE:
            self.kept[stage] = _with(self._rest[stage], self._form, list(self._parcels.unpack(value)))

    def free(self, value: Value, tier: Tier) -> None:
        """Drop the copy in ``tier``."""
        stage = _stage_of(value)
        if tier is Tier.DEVICE:
            del self.kept[stage]
            return
        self._parcels.free(value, tier)
        if not self._parcels.holds(value):
            del self._rest[stage]

    def close(self) -> None:
        """Drop all copies: the call has ended, or nobody will differentiate it."""
        self._rest.clear()
        self._parcels.close()


def _stage_of(value: Value) -> int:
    if value.kind is not Kind.STATE:
        raise ScheduleError(f"a loop moves only states, so it cannot obey a plan that moves {value}")
    return value.index


def _aligned(kept: Kept, form: Form) -> Kept:
    """The same; arrays lie in memory of PyTorch's, which can travel."""
    leaves = list(form.leaves(kept.state))
    if not any(isinstance(leaves[i], ARRAYS) for i in form.tensors):
        return kept
    copies = {
        id(leaf): torch.from_numpy(numpy.array(leaf)).clone().numpy() for leaf in map(leaves.__getitem__, form.tensors)
    }
    state = form.build([copies.get(id(leaf), leaf) for leaf in leaves])
    return replace(kept, state=state)


def _tensors(kept: Kept, form: Form, drawn: bool) -> list[torch.Tensor]:
    """All that moves, each tensor once and in a fixed order: of the state, generators (if ``drawn``), buffers,
    cells."""
    leaves = form.leaves(kept.state)
    moved = {id(leaves[i]): leaves[i] for i in form.tensors}.values()
    generators = (kept.torch_generators.cpu,) if drawn and kept.torch_generators is not None else ()
    buffers = () if kept.buffers is None else kept.buffers.copies
    tensors = [leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf) for leaf in moved]
    contents = () if kept.contents is None else kept.contents.copies
    return [*tensors, *generators, *buffers, *contents]


def _without(kept: Kept, form: Form, drawn: bool) -> Kept:
    """The same without what moves, and numbers in place of the state's tensors: one that appears twice has one."""
    leaves = list(form.leaves(kept.state))
    number = {key: i for i, key in enumerate(dict.fromkeys(id(leaves[i]) for i in form.tensors))}
    for i in form.tensors:
        leaves[i] = number[id(leaves[i])]
    generators, buffers, contents = kept.torch_generators, kept.buffers, kept.contents
    if drawn and generators is not None:
        generators = replace(generators, cpu=torch.empty(0, device="cpu"))
    if buffers is not None:
        buffers = replace(buffers, copies=())
    if contents is not None:
        contents = replace(contents, copies=())
    return Kept(form.build(leaves), [], generators, kept.host_generators, buffers, contents)


def _with(rest: Kept, form: Form, tensors: list[torch.Tensor]) -> Kept:
    leaves = list(form.leaves(rest.state))
    count = len({leaves[i] for i in form.tensors})
    for i in form.tensors:
        found = tensors[leaves[i]]
        leaves[i] = found if form.parts[i].kind is torch.Tensor else found.numpy()
    beside = tensors[count:]
    generators, buffers, contents = rest.torch_generators, rest.buffers, rest.contents
    if generators is not None and not generators.cpu.numel():
        generators = replace(generators, cpu=beside.pop(0))
    if buffers is not None:
        count = len(buffers.slots)
        buffers, beside = replace(buffers, copies=tuple(beside[:count])), beside[count:]
    if contents is not None:
        contents = replace(contents, copies=tuple(beside))
    state = form.build(leaves)
    return Kept(state, versions(form, form.tensors, state), generators, rest.host_generators, buffers, contents)
