"""`SavedTensors`: what autograd saves in one recorded stage, held where it can be moved away and put back."""

from collections.abc import Sequence
from typing import Any

import torch

from tapestream.errors import ScheduleError
from tapestream.executor.travel.cargo import Stays, has_storage, head_of, held_by_others
from tapestream.runner.guards import Pack, Unpack, written_since_saved


class Handle:
    """What the graph holds instead of a saved tensor; ``tensor`` is None while that is away."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version


class SavedTensors:
    """The saved tensors of the stage ``name``, from its record to its backward.

    Hooks switch autograd's own check of version counters off, so it is made here: when a tensor is read, and before
    and after its bytes are copied.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._handles: list[Handle] = []
        self._staying: frozenset[int] = frozenset()

    def hooks(self) -> tuple[Pack, Unpack]:
        """Saved-tensor hooks to record the stage under. They keep nothing alive but the stage's name."""
        name, handles = self.name, self._handles

        def pack(tensor: torch.Tensor) -> Handle:
            handle = Handle(tensor.detach())  # with its graph, a saved output would keep that graph alive for ever
            handles.append(handle)
            return handle

        def unpack(handle: Any) -> torch.Tensor:
            return _read(handle, name)

        return pack, unpack

    def settle(self, stays: Stays) -> None:
        """The stage has run, and its states are still held: what only the graph holds may travel; all else stays, and
        so does what ``stays`` says."""
        tensors = self.tensors()
        fixed = (head_of(t) for t in tensors if has_storage(t) and stays(t, head_of(t)))
        self._staying = frozenset((*held_by_others(tensors), *fixed))

    def stays(self, tensor: torch.Tensor, head: int) -> bool:
        """Whether the storage ``head`` does not travel: something besides the graph held its bytes when the stage had
        run, or they were not for us to move."""
        return head in self._staying

    def tensors(self) -> list[torch.Tensor]:
        """All of them, on the device. Raises GradientError for one that was written into."""
        return [_read(handle, self.name) for handle in self._handles]

    def check(self) -> None:
        """Raise GradientError when one that is on the device was written into."""
        for handle in self._handles:
            if handle.tensor is not None:
                _read(handle, self.name)

    def leave(self) -> None:
        """Drop the bytes of those that travel."""
        for handle in self._handles:
            if (
                handle.tensor is not None
                and has_storage(handle.tensor)
                and not self.stays(handle.tensor, head_of(handle.tensor))
            ):
                handle.tensor = None

    def come(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are back: one for each, in order."""
        for handle, tensor in zip(self._handles, tensors, strict=True):
            if handle.tensor is None:
                handle.tensor, handle.version = tensor, tensor._version

    def let_go(self) -> None:
        """From now on the graph alone holds them, and drops each as soon as its backward is done with it."""
        self._handles.clear()


def _read(handle: Handle, name: str) -> torch.Tensor:
    if handle.tensor is None:
        raise ScheduleError(f"a saved tensor of {name} was asked for while it was away from the device")
    if handle.tensor._version != handle.version:
        raise written_since_saved(name)
    return handle.tensor
