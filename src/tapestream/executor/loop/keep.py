"""Restart checkpoints of a loop: the state, and the generators, buffers and cells that go with it."""

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from tapestream.capture.buffers import BufferSnapshot, copied, put
from tapestream.capture.cells import Contents
from tapestream.errors import GradientError
from tapestream.executor.loop.form import Form
from tapestream.executor.loop.traits import Body
from tapestream.runner.ambient import HostGenerators, TorchGenerators
from tapestream.runner.guards import check_versions
from tapestream.runner.state import replica


@dataclass(slots=True)
class Kept:
    """One restart checkpoint. The versions of its tensors tell whether somebody wrote into it."""

    state: Any
    versions: list[int]
    torch_generators: TorchGenerators | None
    host_generators: HostGenerators | None
    buffers: BufferSnapshot | None
    contents: Contents | None


class Keeper:
    """Makes restart checkpoints and makes them live again. Equal generator states are held once."""

    def __init__(self, body: Body) -> None:
        self._form, self._traits, self._device = body.form, body.traits, body.device
        self._places = body.form.tensors
        self._torch = TorchGenerators.capture(self._device)
        self._host = HostGenerators.capture(body.traits.generators)
        self._first = self._torch
        self._draws_torch, self._draws_host = True, self._traits.draws_host

    def keep(self, state: Any) -> Kept:
        """``state``, live now; copied where the step will write into it."""
        traits = self._traits
        generators = None
        if self._draws_torch:
            if not self._torch.still():
                self._torch = TorchGenerators.capture(self._device)
            generators = self._torch
        host = HostGenerators.capture(traits.generators) if self._draws_host else None
        buffers = BufferSnapshot.take(traits.buffers) if traits.buffers else None
        contents = Contents.take(traits.cells) if traits.cells else None
        kept = self._unshared(state)
        return Kept(kept, versions(self._form, self._places, kept), generators, host, buffers, contents)

    def restore(self, kept: Kept, last: bool) -> Any:
        """The state of ``kept``, with generators and buffers as they were then."""
        state = kept.state
        now = versions(self._form, self._places, state)
        check_versions("a later step of the loop", tuple(kept.versions), tuple(now))
        if self._draws_torch and kept.torch_generators is not None:
            kept.torch_generators.restore()
        if kept.host_generators is not None:
            kept.host_generators.restore()
        if kept.buffers is not None:
            for slot, copy in zip(kept.buffers.slots, kept.buffers.copies, strict=True):
                put(slot, copied(copy))
        if kept.contents is not None:
            kept.contents.show()
        return state if last else self._unshared(state)

    def own(self, state: Any) -> Any:
        """The caller's state, copied where the step will write into it."""
        return self._unshared(state)

    def end_forward(self) -> None:
        """What was never drawn from in the whole sweep need not be looked at again. Raises GradientError when
        something was that watching the first steps had not shown."""
        self._draws_torch = not self._first.still()
        if not self._draws_host and not self._host.equals(HostGenerators.capture(self._traits.generators)):
            raise GradientError(
                "Loop: a later step draws from Python's or NumPy's random generator or from one of its own, but the "
                "first two steps did not; draw from torch's generator instead, or draw in every step"
            )

    def _unshared(self, state: Any) -> Any:
        if not self._traits.mutates:
            return state
        copies: dict[int, Any] = {}
        leaves = list(self._form.leaves(state))
        with torch.enable_grad():  # a view made without gradients could not be written into with them
            for i in self._traits.mutates:
                leaf = leaves[i]
                if id(leaf) not in copies:
                    copies[id(leaf)] = replica(leaf) if isinstance(leaf, torch.Tensor) else numpy.array(leaf)
                leaves[i] = copies[id(leaf)]
        return self._form.build(leaves)


def versions(form: Form, places: tuple[int, ...], state: Any) -> list[int]:
    """Version counters of the tensors of a state."""
    leaves = form.leaves(state)
    return [leaves[i]._version for i in places if isinstance(leaves[i], torch.Tensor)]
